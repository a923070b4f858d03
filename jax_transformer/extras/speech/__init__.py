"""Models that read sound."""
