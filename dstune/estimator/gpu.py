"""What the estimator knows of the GPU that it pretends to have: numbers only, no torch.

The compute capability decides which kernels CUDA's libraries choose and how large their workspaces are.
"""

from dataclasses import dataclass

from dstune.units import KIB, MIB


@dataclass(frozen=True, slots=True)
class GpuTraits:
    """The traits of a GPU that change what is allocated.

    Attributes:
        major, minor: Compute capability.
        num_multiprocessors: Streaming multiprocessors, which decide how reductions are split.
        wanted_attention: The attention kernel that the user asks for, or None.
    """

    major: int
    minor: int
    num_multiprocessors: int = 108
    wanted_attention: str | None = None

    @property
    def threads_per_multiprocessor(self) -> int:
        """Most threads resident on one multiprocessor.

        Source: CUDA C++ Programming Guide, technical specifications for each compute capability.
        """
        if (self.major, self.minor) == (7, 5):
            return 1024
        if (self.major == 8 and self.minor != 0) or self.major == 12:
            return 1536
        return 2048

    @property
    def prefers_cudnn_attention(self) -> bool:
        """Whether cuDNN's attention comes first.

        Source: torch `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (`check_prefer_cudnn_attention`), with
        cuDNN above 9.15.0, as builds for CUDA 13 bring; seen on an H200 with torch 2.11.
        """
        return self.major in {9, 10}

    @property
    def cublas_workspace_bytes(self) -> int:
        """One for each cuBLAS handle and stream.

        Source: torch 2.11 `aten/src/ATen/cuda/CublasHandlePool.cpp` (`parseChosenWorkspaceSize`): 32 MiB on 9.0 and
        10.x, otherwise 2 x 4096 KiB + 8 x 16 KiB.
        """
        if (self.major, self.minor) == (9, 0) or self.major == 10:
            return 32 * MIB
        return 2 * 4096 * KIB + 8 * 16 * KIB

    @property
    def cublaslt_workspace_bytes(self) -> int:
        """For matrix products with a fused bias.

        Source: the same file (`_parseChosenWorkspaceSize` of cublasLt): 1 MiB; measured on an H200.
        """
        return MIB

    @property
    def has_bf16(self) -> bool:
        """Whether bfloat16 is native.

        Source: torch 2.11 `torch/cuda/__init__.py` (`is_bf16_supported`): compute capability 8.0 and above.
        """
        return self.major >= 8

    @property
    def has_fp16(self) -> bool:
        """Whether DeepSpeed takes fp16.

        Source: deepspeed 0.19.8 `accelerator/cuda_accelerator.py` (`is_fp16_supported`): 7.0 and above.
        """
        return self.major >= 7
