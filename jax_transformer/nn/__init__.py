"""The layers. No file here knows an architecture's name: mathematics stands in free functions, parameters in classes, differences in the config."""
