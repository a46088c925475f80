"""The built-in table of kernel names, on names as profilers write them."""

import pytest

from bench.kineto.classes import KernelTable, read_table, without_arguments

# class | kernel, copy or memset
NAMES = r"""
all_reduce | ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
all_reduce | ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)
all_reduce | nccldevkernel_allreduce_sum_bf16_ring_ll
all_reduce | void multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(x)
all_reduce | void c10d::symmetric_memory::two_shot_all_reduce_kernel<float>(x)
all_reduce | void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(x)
all_gather | ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)
all_gather | ncclSymkDevKernel_AllGather_LLMC(ncclSymDevArgs)
all_gather | void c10d::symmetric_memory::multimem_all_gather_kernel(x)
reduce_scatter | ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)
send_recv | ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)
send_recv | void deep_ep::elastic::pp_send_impl<1>(void*)
broadcast | ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)
broadcast | ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)
other_communication | ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)
other_communication | void nvshmemi_transfer_barrier<1>(x)
other_communication | void barrier_on_stream_kernel_threadgroup<(threadgroup_t)1>(int, int)
other_communication | nvshmemi_proxy_quiet_entrypoint(void)
dispatch | void deep_ep::internode::dispatch<false, 2, false, 8192>(int4*, float*, long*)
dispatch | void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)
dispatch | void deep_ep::internode_ll::dispatch<true, false, 3, 10, 7168>(void*, void*)
dispatch | void deep_ep::elastic::hybrid_dispatch_impl<true, 8>(void*)
dispatch | void hybrid_ep::dispatch_kernel<unsigned short, 4>(hybrid_ep::dispatch_kernel_param_t<unsigned short>)
dispatch | void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*, float*)
dispatch | _ZN7deep_ep9internode8dispatchILb0ELi2ELb0EEEvP4int4
dispatch | EpDispatchInterNodeKernel_bf16
dispatch | void bytedance::flux::dis_scatter_forward_flatten_kernel<X>(x)
combine | void deep_ep::internode_ll::combine<3, 10, 7168, 9>(void*, void*)
combine | void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(__nv_bfloat16*, float*)
combine | void deep_ep::elastic::combine_reduce_epilogue_impl<8>(void*)
combine | void hybrid_ep::combine_kernel<4>(x)
combine | void mori::moe::EpCombineIntraNodeKernel<x>(x)
combine | void bytedance::flux::topk_gather_rs_kernel<X>(x)
combine | void bytedance::flux::dis_scatter_backward_kernel<X>(x)
notify | void deep_ep::internode::notify_dispatch<false, 2>(int const*, int*)
notify | void deep_ep::internode::cached_notify<false>(int, int)
notify | void deep_ep::intranode::cached_notify_combine<8>(void**, int*)
notify | void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)
notify | void deep_ep::internode_ll::clean_low_latency_buffer<1024>(int*, int)
notify | void deep_ep::intranode::barrier<8>(int**, int)
all_to_all | void bytedance::flux::a2a_single_kernel<X>(x)
all_to_all | void all_to_all_vdev_2d<1>(x)
fused | void cutlass::Kernel2<bytedance::flux::GemmV2AGKernel_Kernel<X> >(x)
fused | void cutlass::Kernel2<bytedance::flux::GemmGroupedV2AGScatter_Kernel<X> >(x)
fused | void cutlass::device_kernel<bytedance::flux::GemmGroupedV3GatherRSTS_Kernel<X> >(x)
fused | void cutlass::Kernel2<bytedance::flux::GemmV2ReduceScatter_Kernel<X> >(x)
peer_copy | Memcpy PtoP (Device -> Device)
host_copy | Memcpy HtoD (Pinned -> Device)
host_copy | Memcpy DtoH (Device -> Pageable)
copy | Memcpy DtoD (Device -> Device)
memset | Memset (Device)
gemm | nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT
gemm | sm90_xmma_gemm_bf16f32_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas
gemm | void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(x::Params)
gemm | void cublasLt::splitKreduce_kernel<32, 16, int, float>(x)
gemm | void gemv2T_kernel_val<int, int, float, 128, 16, 4, 4, false, false, cublasGemvParamsEx<int> >(x)
gemm | void deep_gemm::fp8_gemm_kernel<7168u, 2048u, 128u, 1u, 4u, 1u, false, (deep_gemm::GemmType)0>(__nv_bfloat16*)
gemm | Cijk_Alik_Bljk_SB_Bias_AS_SAV
gemm | triton_tem_fused_mm_2
gemm | triton_mm
grouped_gemm | void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 5u, 2u, true, (deep_gemm::GemmType)1>(__nv_bfloat16*)
grouped_gemm | void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<GroupProblemShape<X> > >(x)
grouped_gemm | _ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalINS1_17GroupProblemShapeIN4cute5tupleIJiiiEEEEE
grouped_gemm | void cutlass::Kernel2<cutlass::gemm::kernel::GemmGrouped<X> >(X)
grouped_gemm | _m_grouped_gemm_kernel
grouped_gemm | fused_moe_kernel
grouped_gemm | void cutlass::Kernel2<bytedance::flux::GemmGroupedV2CommNone_Kernel<X> >(x)
attention | void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t, X>, true>(x)
attention | void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<X>(flash::Flash_bwd_params)
attention | void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<X> > >(flash::X::Params)
attention | void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128> >(x)
attention | cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3i_128x128x128_4x1x1_cga1x1x1_kernel0_0
attention | fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<x>::Params)
attention | triton_tem_fused_flex_attention_0
convolution | sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16
convolution | void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x128_32x4_nhwc_align4>(x)
permute | _unpermute_kernel
permute | _sort_chunks_by_map
permute | void moe_permute_topK_kernel<__nv_bfloat16>(int)
permute | void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<x>(x)
elementwise | triton_poi_fused_add_mm_0
elementwise | triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3
elementwise | void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<x>, std::array<x> >(int)
elementwise | void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::X<2> >(x)
elementwise | void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float, int> >(long)
elementwise | void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<X>(X)
elementwise | void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::X<2u> >(x)
elementwise | void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>(x)
elementwise | void layer_norm::ln_fwd_kernel<x>(x)
unknown | my_secret_kernel
unknown | my_secret_kernel(ncclWork*, deep_ep::dispatch, gemm)
unknown | _ZN2my3fooEv
"""


@pytest.fixture(scope="module")
def table() -> KernelTable:
    return read_table()


@pytest.mark.parametrize("line", NAMES.strip().splitlines())
def test_known_kernels_have_their_class(table: KernelTable, line: str) -> None:
    expected, name = line.split(" | ", 1)
    assert table.classify(name) == expected


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("void f<a(int)#1, b>(int, x<y>)", "void f<a(int)#1, b>"),
        ("void at::(anonymous namespace)::g<4>(int)", "void at::(anonymous namespace)::g<4>"),
        ("plain_name", "plain_name"),
        ("Memset (Device)", "Memset "),
        ("_ZN7deep_ep6layout19get_dispatch_layoutILi256EEEvPKl", "deep_ep::layout::get_dispatch_layout"),
    ],
)
def test_argument_lists_are_cut_off(name: str, head: str) -> None:
    assert without_arguments(name) == head


@pytest.mark.parametrize(
    ("annotation", "word"),
    [
        ("forward", "forward"),
        ("## forward ##", "forward"),
        ("DistributedDataParallel.forward", "forward"),
        ("forward_step", "forward"),
        ("FSDP::pre_forward", "forward"),
        ("attn(F)", "forward"),
        ("PP:3F12", "forward"),
        ("attn:F3.5", "forward"),
        ("## backward ##", "backward"),
        ("backward_step", "backward"),
        ("PP:3B12", "backward"),
        ("FSDP::post_backward_reshard", "backward"),
        ("mlp(B)", "backward_unless_split"),
        ("expert:B3.5", "backward_unless_split"),
        ("PP:3I12", "input_gradient"),
        ("mlp dgrad", "input_gradient"),
        ("PP:3W12", "weight_gradient"),
        ("mlp(W)", "weight_gradient"),
        ("backward_dw", "weight_gradient"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("Optimizer.zero_grad#SGD.zero_grad", None),
        ("ProfilerStep#3", None),
        ("forward_backward_step", None),
        ("nccl:all_reduce", None),
        ("1F1B", None),
    ],
)
def test_annotations_tell_their_phase(table: KernelTable, annotation: str, word: str | None) -> None:
    assert table.phase_word(annotation) == word
