"""Kernels compiled without a GPU, and the assembler that Triton runs for it."""


def ptxas_version(capability: int) -> str:
    """The version of the ptxas that Triton runs for a compute capability, "12.9", or why there is none."""
    from triton.backends.nvidia import compiler

    try:
        return compiler.get_ptxas(capability).version
    except RuntimeError as error:
        return str(error)
