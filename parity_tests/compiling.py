"""XLA's flags for programs that run once. Set them in the environment before importing jax."""

from importlib import metadata

FLAGS = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
    )
)
# jax 0.12 removed this flag, and an unknown flag ends the process
if metadata.version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
