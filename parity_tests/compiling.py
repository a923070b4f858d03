"""XLA's flags for programs that run once. To be put into the environment before jax is imported."""

from importlib import metadata

FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
if metadata.version("jaxlib").startswith(
    "0.10."
):  # where a flag is not known, as this one from 0.12 on, the process ends
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
