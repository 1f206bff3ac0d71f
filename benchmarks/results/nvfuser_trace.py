# mixtral-8x7b, NVIDIA H200, torch 2.11.0+cu130, nvFuser 0.2.36+git7e04d26
# graph  weight                           experts x out x in  rows  decision        reason
# 0      routed_experts.gate_proj.weight  8 x 14336 x 4096    2     nvfp4 + swiglu  the weight is frozen; gate, up and SwiGLU in one operator; not by nvFuser: the compute capability is 9.0, its NVFP4 kernel runs on 10.0 alone
# 0      routed_experts.up_proj.weight    8 x 14336 x 4096    2     nvfp4 + swiglu  the weight is frozen; gate, up and SwiGLU in one operator; not by nvFuser: the compute capability is 9.0, its NVFP4 kernel runs on 10.0 alone
# 0      routed_experts.down_proj.weight  8 x 4096 x 14336    2     nvfp4           the weight is frozen; not by nvFuser: the compute capability is 9.0, its NVFP4 kernel runs on 10.0 alone
# 1      routed_experts.gate_proj.weight  8 x 14336 x 4096    64    nvfp4 + swiglu  the weight is frozen; gate, up and SwiGLU in one operator; not by nvFuser: the compute capability is 9.0, its NVFP4 kernel runs on 10.0 alone
# 1      routed_experts.up_proj.weight    8 x 14336 x 4096    64    nvfp4 + swiglu  the weight is frozen; gate, up and SwiGLU in one operator; not by nvFuser: the compute capability is 9.0, its NVFP4 kernel runs on 10.0 alone
# 1      routed_experts.down_proj.weight  8 x 4096 x 14336    64    nvfp4           the weight is frozen; not by nvFuser: the compute capability is 9.0, its NVFP4 kernel runs on 10.0 alone
# 2      routed_experts.gate_proj.weight  8 x 14336 x 4096    2048  nvfp4 + swiglu  the weight is frozen; gate, up and SwiGLU in one operator; not by nvFuser: the compute capability is 9.0, its NVFP4 kernel runs on 10.0 alone
# 2      routed_experts.up_proj.weight    8 x 14336 x 4096    2048  nvfp4 + swiglu  the weight is frozen; gate, up and SwiGLU in one operator; not by nvFuser: the compute capability is 9.0, its NVFP4 kernel runs on 10.0 alone
# 2      routed_experts.down_proj.weight  8 x 4096 x 14336    2048  nvfp4           the weight is frozen; not by nvFuser: the compute capability is 9.0, its NVFP4 kernel runs on 10.0 alone

# Constructed by Unwrap the actual return value
import torch
import torch.nn.functional
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(hidden_states, t_router_weight, t_routed_experts_down_proj_weight_fp4, t_routed_experts_down_proj_weight_scale, t_routed_experts_down_proj_weight_global_scale, weight_and_t_routed_experts_up_proj_weight_fp4, weight_and_t_routed_experts_up_proj_weight_scale, weight_and_t_routed_experts_up_proj_weight_global_scale):
  # t_routed_experts_down_proj_weight_fp4: "cuda:0 ui8[8, 7168, 4096]"
  # t_routed_experts_down_proj_weight_scale: "cuda:0 f8_e4m3fn[8, 4096, 896]"
  # t_routed_experts_down_proj_weight_global_scale: "cuda:0 f32[8]"
  # weight_and_t_routed_experts_up_proj_weight_fp4: "cuda:0 ui8[8, 2048, 28672]"
  # weight_and_t_routed_experts_up_proj_weight_scale: "cuda:0 f8_e4m3fn[8, 28672, 256]"
  # weight_and_t_routed_experts_up_proj_weight_global_scale: "cuda:0 f32[8, 28672]"
  # hidden_states: "cuda:0 bf16[1, 1024, 4096]"
  # t_router_weight: "cuda:0 bf16[8, 4096]"

  # thunder/torch/experimental/dtensor_torch_and_prims.py:69: 	            return single_device_symbol(*args, **kwargs)
  t115 = torch.reshape(hidden_states, (-1, 4096))  # t115: "cuda:0 bf16[1024, 4096]"
    # t115 = ltorch.reshape(hidden_states, (-1, 4096))  # t115: "cuda:0 bf16[1024, 4096]"
      # t115 = prims.reshape(hidden_states, (1024, 4096))  # t115: "cuda:0 bf16[1024, 4096]"

  # torch/nn/modules/linear.py:134: 	        return F.linear(input, self.weight, self.bias)
  t110 = torch.nn.functional.linear(t115, t_router_weight, None)  # t110: "cuda:0 bf16[1024, 8]"
    # t110 = ltorch.linear(t115, t_router_weight, None)  # t110: "cuda:0 bf16[1024, 8]"
      # t110 = prims.linear(t115, t_router_weight, None)  # t110: "cuda:0 bf16[1024, 8]"
  [logits_TA, ids_M, order_M, ones_M, t16] = nvFusion0(t110)
    # (logits_TA, ids_TA) = prims.topk(t110, 2, 1, True, True)
    # ids_M = prims.reshape(ids_TA, (2048,))  # ids_M: "cuda:0 i64[2048]"
    # order_M = ltorch.argsort(ids_M, -1, False, True)  # order_M: "cuda:0 i64[2048]"
    # ones_M = prims.full((2048,), 1, device=devices.Device("cuda:0"), dtype=dtypes.int32)  # ones_M: "cuda:0 i32[2048]"
    # t16 = prims.full((8,), 0, device=devices.Device("cuda:0"), dtype=dtypes.int32)  # t16: "cuda:0 i32[8]"
  del t110

  # thunder_moe/nn.py:378: 	    counts_E = torch.zeros(num_experts, dtype=torch.int32, device=ids_M.device).scatter_add(0, ids_M, ones_M)
  t111 = torch.scatter_add(t16, 0, ids_M, ones_M)  # t111: "cuda:0 i32[8]"
    # t111 = ltorch.scatter_add(t16, 0, ids_M, ones_M)  # t111: "cuda:0 i32[8]"
      # t111 = prims.scatter_add(t16, ids_M, ones_M, 0)  # t111: "cuda:0 i32[8]"
  del t16, ids_M, ones_M
  [offsets_E, rows_MH, t48, t49] = nvFusion1(t111, logits_TA, order_M, t115)
    # offsets_E = ltorch.cumsum(t111, 0, dtype=torch.int32)  # offsets_E: "cuda:0 i32[8]"
    # t19 = prims.convert_element_type(logits_TA, dtypes.float32)  # t19: "cuda:0 f32[1024, 2]"
    # t20 = prims.neg(t19)  # t20: "cuda:0 f32[1024, 2]"
    # t21 = prims.exp(t20)  # t21: "cuda:0 f32[1024, 2]"
    # t22 = prims.add(1.0, t21)  # t22: "cuda:0 f32[1024, 2]"
    # t23 = prims.reciprocal(t22)  # t23: "cuda:0 f32[1024, 2]"
    # t24 = prims.convert_element_type(t23, dtypes.bfloat16)  # t24: "cuda:0 bf16[1024, 2]"
    # t25 = prims.reshape(t24, (2048,))  # t25: "cuda:0 bf16[2048]"
    # t26 = prims.lt(order_M, 0)  # t26: "cuda:0 b8[2048]"
    # t27 = prims.where(t26, 2048, 0)  # t27: "cuda:0 i64[2048]"
    # t28 = prims.add(order_M, t27)  # t28: "cuda:0 i64[2048]"
    # weight_M = prims.take(t25, t28, 0)  # weight_M: "cuda:0 bf16[2048]"
    # t30 = prims.signbit(order_M)  # t30: "cuda:0 b8[2048]"
    # t31 = prims.ne(t30, False)  # t31: "cuda:0 b8[2048]"
    # t32 = prims.fmod(order_M, 2)  # t32: "cuda:0 i64[2048]"
    # t33 = prims.ne(t32, 0)  # t33: "cuda:0 b8[2048]"
    # t34 = prims.bitwise_and(t31, t33)  # t34: "cuda:0 b8[2048]"
    # t35 = prims.div(order_M, 2)  # t35: "cuda:0 i64[2048]"
    # t36 = prims.convert_element_type(t34, dtypes.int64)  # t36: "cuda:0 i64[2048]"
    # t37 = prims.sub(t35, t36)  # t37: "cuda:0 i64[2048]"
    # t38 = prims.lt(t37, 0)  # t38: "cuda:0 b8[2048]"
    # t39 = prims.where(t38, 1024, 0)  # t39: "cuda:0 i64[2048]"
    # t40 = prims.add(t37, t39)  # t40: "cuda:0 i64[2048]"
    # t41 = prims.take(t115, t40, 0)  # t41: "cuda:0 bf16[2048, 4096]"
    # t42 = prims.broadcast_in_dim(weight_M, [2048, 1], [0])  # t42: "cuda:0 bf16[2048, 1]"
    # t43 = prims.broadcast_in_dim(t42, (2048, 4096), (0, 1))  # t43: "cuda:0 bf16[2048, 4096]"
    # t44 = prims.convert_element_type(t41, dtypes.float32)  # t44: "cuda:0 f32[2048, 4096]"
    # t45 = prims.convert_element_type(t43, dtypes.float32)  # t45: "cuda:0 f32[2048, 4096]"
    # t46 = prims.mul(t44, t45)  # t46: "cuda:0 f32[2048, 4096]"
    # rows_MH = prims.convert_element_type(t46, dtypes.bfloat16)  # rows_MH: "cuda:0 bf16[2048, 4096]"
    # t48 = prims.full((2048,), 0, device=devices.Device("cuda:0"), dtype=dtypes.int64)  # t48: "cuda:0 i64[2048]"
    # t49 = prims.iota(2048, start=0, step=1, device=devices.Device("cuda:0"), dtype=dtypes.int64)  # t49: "cuda:0 i64[2048]"
  del t111, logits_TA, t115

  # thunder_moe/nn.py:384: 	    return torch.zeros_like(order_M).scatter(0, order_M, torch.arange(order_M.shape[0], device=order_M.device))
  t112 = torch.scatter(t48, 0, order_M, t49)  # t112: "cuda:0 i64[2048]"
    # t112 = ltorch.scatter(t48, 0, order_M, t49, value=None, reduce=None)  # t112: "cuda:0 i64[2048]"
      # t112 = prims.scatter(t48, order_M, t49, 0)  # t112: "cuda:0 i64[2048]"
  del t48, order_M, t49
  t113 = f16a_nvfp4weight_grouped_swiglu(rows_MH, weight_and_t_routed_experts_up_proj_weight_fp4, weight_and_t_routed_experts_up_proj_weight_scale, weight_and_t_routed_experts_up_proj_weight_global_scale, offsets_E, None, None, None, layout='linear', alpha=1.0, limit=None, up_shift=0.0, activation_amax=None)  # t113: "cuda:0 bf16[2048, 14336]"
  del rows_MH
  t114 = f16a_nvfp4weight_scaled_grouped_mm(t113, t_routed_experts_down_proj_weight_fp4, t_routed_experts_down_proj_weight_scale, t_routed_experts_down_proj_weight_global_scale, offsets_E, None, None, layout='linear', activation_amax=None)  # t114: "cuda:0 bf16[2048, 4096]"
  del t113, offsets_E
  [t92] = nvFusion2(t112, t114)
    # t84 = prims.lt(t112, 0)  # t84: "cuda:0 b8[2048]"
    # t85 = prims.where(t84, 2048, 0)  # t85: "cuda:0 i64[2048]"
    # t86 = prims.add(t112, t85)  # t86: "cuda:0 i64[2048]"
    # out_MH = prims.take(t114, t86, 0)  # out_MH: "cuda:0 bf16[2048, 4096]"
    # t88 = prims.reshape(out_MH, (1024, 2, 4096))  # t88: "cuda:0 bf16[1024, 2, 4096]"
    # t89 = prims.convert_element_type(t88, dtypes.float32)  # t89: "cuda:0 f32[1024, 2, 4096]"
    # t90 = prims.sum(t89, (1,))  # t90: "cuda:0 f32[1024, 4096]"
    # out_TH = prims.convert_element_type(t90, dtypes.bfloat16)  # out_TH: "cuda:0 bf16[1024, 4096]"
    # t92 = prims.reshape(out_TH, (1, 1024, 4096))  # t92: "cuda:0 bf16[1, 1024, 4096]"
  del t112, t114
  return (t92,)
