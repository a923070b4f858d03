"""Write a model as programs in StableHLO, which need jax and none of this package: ``convert RUN
OUT --to stablehlo``.
"""
