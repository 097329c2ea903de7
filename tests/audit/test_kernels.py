"""What a GPU's kernels are for, by their names; names are from published profiles, none was seen on a GPU of ours."""

import pytest

from pannier.audit.profile import by_purpose


@pytest.mark.parametrize(
    ("kernel", "purpose"),
    [
        ("void at::native::bfloat16_copy_kernel_cuda<...>", "conversion"),
        ("wrapped_convert_12", "conversion"),
        ("triton_poi_fused__to_copy_add_3", "conversion"),
        ("void at::native::vectorized_elementwise_kernel<..., direct_copy_kernel_cuda>", "copy, perhaps a conversion"),
        ("turing_fp16_s1688gemm_fp16_128x64", "product on tensor cores"),
        ("void gemv2T_kernel_val<int, int, __half, __half, __half, float>", "product of halves without tensor cores"),
        ("void internal::gemvx::kernel<int, int, float, float, float>", "product in float32"),
        ("flash_fwd_splitkv_kernel", "attention"),
        ("void at::native::reduce_kernel", "other"),
    ],
)
def test_kernels_are_told_apart(kernel: str, purpose: str) -> None:
    assert by_purpose([(kernel, 1.0), (kernel, 0.5)]) == {purpose: 1.5}
