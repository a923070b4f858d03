"""Write a model as a CTranslate2 folder: ``convert RUN OUT --to ct2``.

CTranslate2 (https://github.com/OpenNMT/CTranslate2) is an inference engine in C++. Facts about it
are from version 4.8.5: its Python specifications, ``src/layers/*.cc`` and ``src/decoding.cc``.
"""
