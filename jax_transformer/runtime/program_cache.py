"""The cache of compiled programs, for the kind of processor that they were compiled for."""

import hashlib
import os
import platform
from pathlib import Path


def use(folder: str | None = None) -> None:
    """Keep JAX's compiled programs in ``folder``, to be read at the next start; ``none`` turns the
    cache off.

    By default they are in JAX_COMPILATION_CACHE_DIR, or in the user's cache folder if that is not
    set. A program fits one kind of processor, so each kind has its own subfolder.
    """
    import jax

    current = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if folder == "none" or (folder is None and current):
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = (Path(folder) if folder else home / "jax_transformer" / "compiled") / _processor()
    jax.config.update("jax_compilation_cache_dir", str(path.absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _processor() -> str:
    """Return a name for this kind of processor, by its instruction set if the system lists it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))][:2]
    digest = hashlib.sha256(
        "\n".join([platform.machine(), platform.processor(), *features]).encode()
    ).hexdigest()
    return f"{platform.machine()}-{digest[:8]}"
