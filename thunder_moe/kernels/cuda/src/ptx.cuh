// Inline PTX: one function per instruction that C++ has no name for.
// Compiled behind common.cuh and in front of the kernels that multiply matrices and decode_attention.cu; calls nothing.
// tests/emulator/cuda_emulator.h has a CPU version of each. The wgmma instructions are in wgmma.cuh.
#ifndef CUDA_EMULATOR

// ---- registers ----

// Each nibble of the selector names a byte of a (0 to 3) or b (4 to 7); with 8 added, its sign bit eight times.
DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}

template <bool BF16>
DEVICE uint32_t multiply2(uint32_t a, uint32_t b) {  // fma with -0: mul.bf16x2 is missing on Ampere; subnormals count
  uint32_t out;
  if constexpr (BF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(0x80008000u));
  else asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// Products of a pair with the low (high) half of `scale`; the multiplier selects the half, without another instruction.
template <bool BF16, bool HIGH>
DEVICE uint32_t multiply_by_half(uint32_t pair, uint32_t scale) {
  uint32_t out;
  if constexpr (BF16 && HIGH) asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; mul.bf16x2 %0, %1, s;}" : "=r"(out) : "r"(pair), "r"(scale));
  else if constexpr (BF16) asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; mul.bf16x2 %0, %1, s;}" : "=r"(out) : "r"(pair), "r"(scale));
  else if constexpr (HIGH) asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; mul.f16x2 %0, %1, s;}" : "=r"(out) : "r"(pair), "r"(scale));
  else asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; mul.f16x2 %0, %1, s;}" : "=r"(out) : "r"(pair), "r"(scale));
  return out;
}

// Releases registers of the warpgroup to the block's pool, or takes them from it.
template <int REGISTERS>
DEVICE void shrink_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
DEVICE void grow_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// True for one thread of a converged warp. ptxas knows that it is one: it does not serialise what follows over the threads.
DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// ---- tensor cores ----

template <bool BF16>
DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (BF16)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Before, lane 4 * i + j holds columns 2 j and 2 j + 1 of row i of a matrix of 16-bit numbers; after, rows 2 j and 2 j + 1 of column i.
DEVICE uint32_t transpose8x8(uint32_t pair) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// ---- addresses in shared memory ----

DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
DEVICE uint4* align_shared(uint4* memory, uint32_t to) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  return memory + ((to - address % to) % to) / sizeof(uint4);
}

// Lane l passes the address of row l % 8 of matrix l / 8, eight 16-bit numbers; out[j] is the lane's pair of matrix j: row
// g, columns 2 t and 2 t + 1.
DEVICE void ldmatrix_x4(uint32_t (&out)[4], const uint4* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(shared_address(row)) : "memory");
}

// The same of transposed matrices: rows 2 t and 2 t + 1, column g.
DEVICE void ldmatrix_x4_transposed(uint32_t (&out)[4], const uint4* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(shared_address(row)) : "memory");
}

// ---- loads from global memory, and asynchronous copies by the threads (cp.async) ----

DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE uint4 load_weights16(const uint8_t* p) {  // read once by this SM: not kept in L1
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE float load_l2(const float* p) {  // past L1, for what another block has written
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(p) : "memory");
  return value;
}

DEVICE void cp_async4(uint32_t* to_shared, const void* from) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
DEVICE void cp_async16(uint4* to_shared, const void* from, bool valid) {  // zeros where not valid
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// ---- mbarriers (SM90) ----

typedef uint64_t Mbarrier;         // in shared memory
typedef uint32_t MbarrierAddress;  // its shared address
DEVICE MbarrierAddress mbarrier_address(void* barrier) { return shared_address(barrier); }

DEVICE void mbarrier_init(MbarrierAddress barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(MbarrierAddress barrier) { asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
DEVICE void mbarrier_arrive_expect_tx(MbarrierAddress barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void mbarrier_wait(MbarrierAddress barrier, int parity) {  // until the phase of this parity has completed
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@done bra end;\nbra again;\nend:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// ---- bulk copies by the copy engine (SM90), asynchronous: their bytes count towards an mbarrier ----

// An L2 cache policy: the default, or evict_first for what is read once, so that it evicts nothing that is read again (and
// that would first have to be written back).
typedef uint64_t CachePolicy;
DEVICE CachePolicy cache_policy(bool read_once) {
  CachePolicy policy;
  if (!read_once) return 0x1000000000000000;  // as without a policy; createpolicy's evict_normal is another one, and slower
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// `bytes` and both addresses are multiples of 16.
DEVICE void copy_bulk(void* to_shared, const void* from, int bytes, MbarrierAddress barrier, CachePolicy policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to_shared)),
               "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

// A tensor map (CUtensorMap) that the driver encodes: a matrix of 16-bit numbers (rows, K) in boxes of some rows by 64 k.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// The box that starts at (row, k), to [rows][64 k] with 128-byte swizzle; zeros beyond the end of the matrix.
DEVICE void tma_load_box(void* to_shared, const TensorMap* map, int k, int row, MbarrierAddress barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to_shared)),
               "l"(map), "r"(k), "r"(row), "r"(barrier) : "memory");
}
DEVICE void prefetch_tensor_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// ---- synchronization of warps and of blocks ----

// The named barrier `id` (1 to 15), for `threads` threads of whole warps.
DEVICE void named_barrier_sync(int id, int threads) { asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// A binary semaphore in global memory, 0 or 1. Release: writes of this warp are visible to the warp that acquires it. Acquire:
// spins until it is released, then resets it to 0.
DEVICE void semaphore_release(int* semaphore) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(semaphore), "r"(1) : "memory");
}
DEVICE void semaphore_acquire(int* semaphore) {
  int released;
  do asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(released) : "l"(semaphore) : "memory");
  while (released == 0);
  *semaphore = 0;
}

// ---- clusters of thread blocks (SM90): distributed shared memory ----

// A barrier of all threads of the blocks of a cluster; behind the wait, what they have written before they arrived is visible.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Addresses of a place and of an mbarrier in the shared memory of block `rank` of the cluster, from their addresses in this block.
struct RemotePlace {
  uint32_t address, barrier;
};
DEVICE RemotePlace remote_place(float* place, void* barrier, int rank) {
  RemotePlace out;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out.address) : "r"(shared_address(place)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out.barrier) : "r"(shared_address(barrier)), "r"(rank));
  return out;
}
// Stores 16 bytes `offset` bytes behind a place, asynchronously: they count towards its mbarrier.
DEVICE void send_floats(const RemotePlace& to, int offset, const float (&values)[4]) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to.address + offset), "f"(values[0]),
               "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(to.barrier) : "memory");
}
DEVICE void mbarrier_wait_cluster(MbarrierAddress barrier, int parity) {  // mbarrier_wait for what other blocks have sent
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@done bra end;\nbra again;\nend:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
#endif
