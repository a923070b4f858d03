"""Accelerators by name, and their devices for the compiler: none of them has to be there.

The figures are the vendors': dense peaks, memory, and the bytes that one device can send. TPU: the
pages https://docs.cloud.google.com/tpu/docs/v5e, .../v5p and .../v6e. H100 and H200: NVIDIA's data
sheets of the SXM modules, and 400 Gb/s of InfiniBand for each GPU between hosts.
"""

import contextlib
import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

from jax_transformer.errors import ConfigError, nearest

GIB = 2**30
POOL = 0.75
"""The share of a GPU's memory that JAX takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION says more."""


@dataclass(frozen=True)
class Accelerator:
    """One device. A figure that is unknown is 0."""

    title: str
    platform: str
    """tpu, cuda or cpu."""
    memory: int = 0
    """Bytes that a program can use."""
    bfloat16: float = 0.0
    """Operations a second in dense matrix products."""
    float32: float = 0.0
    """The same for float32 arrays in the default precision: TF32 on a GPU, bfloat16 on a TPU."""
    bandwidth: float = 0.0
    """Bytes a second from and to memory."""
    links: float = 0.0
    """Bytes a second that it sends over its links."""
    host: int = 0
    """Devices that these links reach; 0 if all."""
    network: float = 0.0
    """Bytes a second that it sends beyond them."""


def _tpu(title: str, gib: float, peak: float, bandwidth: float, links: float) -> Accelerator:
    return Accelerator(title, "tpu", int(gib * GIB), peak, peak, bandwidth, links)


def _hopper(title: str, memory: int, bandwidth: float) -> Accelerator:
    peaks = (989.4e12, 494.7e12)
    return Accelerator(title, "cuda", memory, *peaks, bandwidth, 450e9, 8, 50e9)


ACCELERATORS = {
    # The memory of a TPU is what its compiler lets a program have
    "v5e": _tpu("TPU v5e", 15.75, 197e12, 819e9, 200e9),
    "v5p": _tpu("TPU v5p", 95.74, 459e12, 2.765e12, 600e9),
    "v6e": _tpu("TPU v6e", 31.25, 918e12, 1.638e12, 400e9),
    "h100": _hopper("NVIDIA H100 SXM", 84_929_347_584, 3.35e12),
    "h200": _hopper("NVIDIA H200 SXM", 150_000_000_000, 4.8e12),
    "cpu": Accelerator("CPU", "cpu"),
}


@dataclass(frozen=True)
class Topology:
    """A number of accelerators of one kind and, for TPUs, their arrangement."""

    kind: str
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Return the topology of ``KIND:SIZE``, such as v5e:4x4, v5p:2x2x1, h100:8 or cpu:4."""
        kind, _, size = text.partition(":")
        known = list(ACCELERATORS)
        if kind not in known:
            hint = nearest(kind, known)
            raise ConfigError(f"--topology {text}: no accelerator of {', '.join(known)}{hint}")
        axes = {"v5e": 2, "v6e": 2, "v5p": 3}.get(kind, 1)
        example = {1: "8", 2: "4x4", 3: "2x2x1"}[axes]
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)" + f"{{{axes - 1}}}", size):
            raise ConfigError(f"--topology {text}: give the size as in {kind}:{example}")
        return cls(kind, tuple(map(int, size.split("x"))))

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def accelerator(self) -> Accelerator:
        return ACCELERATORS[self.kind]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def hosts(self) -> int:
        """The number of machines, of which a TPU's has four devices."""
        of_a_host = 4 if self.accelerator.platform == "tpu" else self.accelerator.host
        return -(-self.count // (of_a_host or self.count))

    @property
    def usable(self) -> int:
        """The bytes of a device that a program can have; 0 if unknown."""
        if self.accelerator.platform != "cuda":
            return self.accelerator.memory
        share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", POOL)
        return int(self.accelerator.memory * float(share))

    @property
    def links(self) -> float:
        """The bytes that a device sends in a second, to the slowest of the others."""
        accelerator = self.accelerator
        beyond = 0 < accelerator.host < self.count
        return accelerator.network if beyond else accelerator.links

    def devices(self) -> list[Any]:
        """Return the devices to compile for. Raises ConfigError for a wrong arrangement."""
        accelerator = self.accelerator
        if accelerator.platform == "cpu":
            return _cpus(self)
        if accelerator.platform == "tpu":
            arguments: dict[str, Any] = {"topology_name": str(self)}
            if self.count == 1:  # a host has a square of four, or one
                arguments["chips_per_host_bounds"] = (1, 1, 1)
        else:
            import jax

            jax.devices("cpu")  # loads the plug-ins
            hosts, rest = divmod(self.count, accelerator.host)
            if hosts and rest:
                raise ConfigError(
                    f"--topology {self}: more than {accelerator.host} come in whole hosts"
                )
            shape = (1, hosts, accelerator.host) if hosts else (1, 1, rest)
            arguments = {
                "topology": "x".join(map(str, shape)),
                "target_config": _target(accelerator),
            }
        from jax.experimental import topologies

        try:
            described = topologies.get_topology_desc(platform=accelerator.platform, **arguments)
            return list(described.devices)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"--topology {self}: {reason}") from None


_COMPILERS = {
    "tpu": ("estimate-tpu", ("libtpu",)),
    "cuda": ("estimate-gpu", ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")),
}
"""The extra that brings the compiler of a platform, and the modules that it may be in."""


def prepare(topology: Topology) -> None:
    """Let JAX start without the topology's accelerators; call this before JAX is imported.

    Nothing runs on an accelerator that is there, and no compiler looks for one. Raises ConfigError
    if the compiler is not installed.
    """
    extra, modules = _COMPILERS.get(topology.accelerator.platform, ("", ()))
    if extra and not any(map(_installed, modules)):
        raise ConfigError(
            f"--topology {topology} needs the compiler for {topology.accelerator.title}: "
            f"pip install 'jax-seq2seq[{extra}]'"
        )
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if topology.accelerator.platform != "cpu":
        # A compiler's programs cannot be read again without its hardware
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "CUDA_VISIBLE_DEVICES": "", "TPU_WORKER_ID": "0"}
        os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-1"}
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # another process may compile as well
        for name in ("TF_CPP_MIN_LOG_LEVEL", "TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL"):
            os.environ.setdefault(name, "3")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that the module would be in
        return False


def _cpus(topology: Topology) -> list[Any]:
    import jax

    with contextlib.suppress(RuntimeError):  # JAX has counted its devices already
        jax.config.update("jax_num_cpu_devices", topology.count)
    devices = jax.devices("cpu")
    if len(devices) < topology.count:
        raise ConfigError(
            f"--topology {topology}: this process has {len(devices)} simulated devices; start it "
            f"with XLA_FLAGS=--xla_force_host_platform_device_count={topology.count}"
        )
    return devices[: topology.count]


def _target(accelerator: Accelerator) -> str:
    """Return the description that XLA's compiler for GPUs needs of one that is not there.

    The figures of compute capability 9.0, as in XLA's own file for H100 SXM:
    https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs
    """
    return f"""
        platform_name: "CUDA"
        device_description_str: "{accelerator.title}"
        dnn_version_info {{ major: 9 minor: 12 }}
        runtime_version {{ major: 12 minor: 9 patch: 0 }}
        gpu_device_info {{
            cuda_compute_capability {{ major: 9 }}
            device_memory_size: {accelerator.memory}
            memory_bandwidth: {accelerator.bandwidth:.0f}
            l2_cache_size: 52428800 clock_rate_ghz: 1.98 core_count: 132 fpus_per_core: 128
            threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
            registers_per_block_limit: 65536 registers_per_core_limit: 65536
            shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
            shared_memory_per_core: 233472
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        }}"""
