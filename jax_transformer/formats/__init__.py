"""File formats: one file each, a registry, and ``open``."""
