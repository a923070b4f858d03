"""The layers: mathematics in free functions, parameters in classes, differences in the config.

No file here knows an architecture's name.
"""
