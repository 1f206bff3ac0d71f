// A router's logits -> scores and expert ids, and the slots t * A + a of tokens sorted by expert, on a CPU.
// Called through ctypes by kernels/cpu/backend.py, compiled together with grouped_mm.cpp; calls numbers.h and exp.h.
// It computes `RouterConfig` and `route` of thunder_moe/routing.py. Threads share the tokens; one sorts the slots.
#include <vector>

#include "exp.h"
#include "numbers.h"

namespace {

constexpr int64_t kTokens = 16;  // of a task

struct Router {
  int64_t tokens, experts, top_k;
  int32_t sigmoid, normalize;
  int64_t num_groups, top_groups, group_best;
  int32_t mask_to_zero;
  float epsilon, least_sum, scale;
};

// Keys order as the values do: -0 as 0, NaN above infinity; with the index, the lower one of equal values is the larger key.
inline uint64_t key_of(float value, int64_t index) {
  const uint32_t bits = bits_of(value + 0.0f);
  const uint32_t key = (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0xFFFFFFFFu : bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t(key) << 32 | uint32_t(~index);
}
inline int64_t index_of(uint64_t key) { return uint32_t(~uint32_t(key)); }

// The keys of the largest `count` of `size` values, in descending order: `count` reductions that compilers vectorize, which a
// heap's branches are slower than. `keys` is scratch.
inline void best_of(const float* values, int64_t size, int64_t count, uint64_t* keys, uint64_t* best) {
  for (int64_t i = 0; i < size; ++i) keys[i] = key_of(values[i], i);
  for (int64_t a = 0; a < count; ++a) {
    uint64_t largest = 0;
    for (int64_t i = 0; i < size; ++i) largest = keys[i] > largest ? keys[i] : largest;
    best[a] = largest;
    keys[index_of(largest)] = 0;
  }
}

inline float sigmoid_of(float value) { return 1 / (1 + exp_of(-value)); }
inline float power_of(float value) { return value < -87.0f ? 0.0f : exp_of(value); }

template <class T>
struct Choice {
  const Router& form;
  std::vector<float> logits, scores, choice, sums;
  std::vector<uint64_t> keys, best;

  explicit Choice(const Router& form)
      : form(form), logits(form.experts), scores(form.experts), choice(form.experts), sums(form.num_groups),
        keys(std::max(form.experts, form.num_groups)), best(std::max({form.top_k, form.top_groups, form.group_best})) {}

  // Removes experts outside of the best groups from the choice.
  void mask_groups() {
    const int64_t size = form.experts / form.num_groups;
    for (int64_t group = 0; group < form.num_groups; ++group) {
      best_of(&choice[group * size], size, form.group_best, keys.data(), best.data());
      sums[group] = 0;
      for (int64_t i = 0; i < form.group_best; ++i) sums[group] += choice[group * size + index_of(best[i])];
    }
    best_of(sums.data(), form.num_groups, form.top_groups, keys.data(), best.data());
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t i = 0; i < form.top_groups; ++i) sums[index_of(best[i])] = 1;
    const float masked = form.mask_to_zero ? 0.0f : -float_of(0x7F800000u);
    for (int64_t group = 0; group < form.num_groups; ++group)
      if (sums[group] == 0) std::fill_n(&choice[group * size], size, masked);
  }

  // The experts of a token and their scores (top_k,).
  void operator()(const T* from, const float* bias, int64_t* ids, float* weights) {
    const int64_t experts = form.experts, top_k = form.top_k;
    for (int64_t i = 0; i < experts; ++i) logits[i] = to_float(from[i]);
    const bool grouped = form.top_groups < form.num_groups, by_score = bias != nullptr || grouped;
    // Chosen by logits, and normalized over the chosen ones: the sum over all experts cancels.
    const bool all = by_score || (!form.sigmoid && (!form.normalize || form.epsilon > 0 || form.least_sum > 0));
    if (all && form.sigmoid) {
      for (int64_t i = 0; i < experts; ++i) scores[i] = sigmoid_of(logits[i]);
    } else if (all) {
      float largest = logits[0], sum = 0;
      for (int64_t i = 1; i < experts; ++i) largest = most(largest, logits[i]);
      for (int64_t i = 0; i < experts; ++i) scores[i] = power_of(logits[i] - largest);
      for (int64_t i = 0; i < experts; ++i) sum += scores[i];
      for (int64_t i = 0; i < experts; ++i) scores[i] /= sum;
    }
    const float* compared = logits.data();
    if (by_score) {
      for (int64_t i = 0; i < experts; ++i) choice[i] = scores[i] + (bias == nullptr ? 0 : bias[i]);
      if (grouped) mask_groups();
      compared = choice.data();
    }
    best_of(compared, experts, top_k, keys.data(), best.data());
    float sum = 0;
    const float largest = logits[index_of(best[0])];
    for (int64_t a = 0; a < top_k; ++a) {
      const int64_t id = ids[a] = index_of(best[a]);
      weights[a] = all ? scores[id] : form.sigmoid ? sigmoid_of(logits[id]) : power_of(logits[id] - largest);
      sum += weights[a];
    }
    sum += form.epsilon;
    const float divisor = !form.normalize ? 1 : sum < form.least_sum ? form.least_sum : sum;  // NaN stays NaN
    for (int64_t a = 0; a < top_k; ++a) weights[a] = weights[a] / divisor * form.scale;
  }
};

template <class T>
void store(const float* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from_float<T>(from[i]);
}

template <class T>
void choose(const T* logits, const float* bias, const Router& form, void* scores, int32_t scores_dtype, int64_t* ids) {
  const int64_t top_k = form.top_k;
  for_each((form.tokens + kTokens - 1) / kTokens, [&](int64_t task) {
    Choice<T> choice(form);
    std::vector<float> weights(top_k);
    for (int64_t token = task * kTokens; token < std::min((task + 1) * kTokens, form.tokens); ++token) {
      const int64_t slot = token * top_k;
      choice(logits + token * form.experts, bias, ids + slot, weights.data());
      if (scores_dtype == kFloat32) store(weights.data(), top_k, static_cast<float*>(scores) + slot);
      if (scores_dtype == kBFloat16) store(weights.data(), top_k, static_cast<bf16*>(scores) + slot);
      if (scores_dtype == kFloat16) store(weights.data(), top_k, static_cast<fp16*>(scores) + slot);
    }
  });
}

// Ids outside [0, experts) go behind all others.
template <class Id>
void route(const Id* ids, int64_t slots, int64_t experts, int32_t* row_slot, int32_t* offsets, int32_t* slot_row) {
  const auto bucket_of = [&](int64_t slot) {
    return ids[slot] >= 0 && int64_t(ids[slot]) < experts ? int64_t(ids[slot]) : experts;
  };
  std::vector<int32_t> next(experts + 2, 0);  // next[1 + bucket]: its slots; then next[bucket]: its next row
  for (int64_t slot = 0; slot < slots; ++slot) ++next[1 + bucket_of(slot)];
  for (int64_t bucket = 0; bucket <= experts; ++bucket) next[bucket + 1] += next[bucket];
  std::copy(next.begin() + 1, next.begin() + 1 + experts, offsets);
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t bucket = bucket_of(slot);
    const int32_t row = next[bucket]++;
    row_slot[row] = int32_t(slot);
    slot_row[slot] = bucket < experts ? row : -1;
  }
}

}  // namespace

extern "C" {

// logits (tokens, experts) -> scores and expert_ids (tokens, top_k), and their order as below; bias (experts,) or null.
int32_t thunder_moe_router(const void* logits, int32_t dtype, const float* bias, int64_t tokens, int64_t experts,
                           int64_t top_k, int32_t sigmoid, int32_t normalize, int64_t num_groups, int64_t top_groups,
                           int64_t group_best, int32_t mask_to_zero, float epsilon, float least_sum, float scale,
                           void* scores, int32_t scores_dtype, int64_t* expert_ids, int32_t* row_slot, int32_t* offsets,
                           int32_t* slot_row) {
  const Router form{tokens,     experts,      top_k,   sigmoid,   normalize, num_groups, top_groups,
                    group_best, mask_to_zero, epsilon, least_sum, scale};
  return guarded([&] {
    if (dtype == kFloat32) choose(static_cast<const float*>(logits), bias, form, scores, scores_dtype, expert_ids);
    if (dtype == kBFloat16) choose(static_cast<const bf16*>(logits), bias, form, scores, scores_dtype, expert_ids);
    if (dtype == kFloat16) choose(static_cast<const fp16*>(logits), bias, form, scores, scores_dtype, expert_ids);
    route(expert_ids, tokens * top_k, experts, row_slot, offsets, slot_row);
  });
}

// expert_ids (slots,), int64 where `wide`, else int32 -> row_slot (slots,), offsets (experts,), slot_row (slots,).
int32_t thunder_moe_route(const void* expert_ids, int32_t wide, int64_t slots, int64_t experts, int32_t* row_slot,
                          int32_t* offsets, int32_t* slot_row) {
  return guarded([&] {
    if (wide) route(static_cast<const int64_t*>(expert_ids), slots, experts, row_slot, offsets, slot_row);
    else route(static_cast<const int32_t*>(expert_ids), slots, experts, row_slot, offsets, slot_row);
  });
}

}  // extern "C"
