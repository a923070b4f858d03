"""Stored weights of other toolkits: JoeyNMT, OpenNMT-py, fairseq, Marian and T5X.

Loads no jax.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax_transformer.architectures import huggingface_state, registry
from jax_transformer.errors import InputError, about_file
from jax_transformer.extras.toolkits import fairseq, joeynmt, opennmt_py
from jax_transformer.extras.toolkits.marian import marian_model as marian_files
from jax_transformer.extras.toolkits.marian import marian_names
from jax_transformer.extras.toolkits.t5x import gin_config, t5x_checkpoint, t5x_names
from jax_transformer.extras.toolkits.toolkit import Toolkit
from jax_transformer.formats.kinds import Kind
from jax_transformer.formats.stored_weights import StoredWeights
from jax_transformer.storage import pt, safetensors
from jax_transformer.storage.lazy import LazyState
from jax_transformer.storage.tensors import Note, TensorInfo
from jax_transformer.storage.untrusted import shown
from jax_transformer.weights import rules, stacked

_TOOLKITS = (joeynmt.TOOLKIT, opennmt_py.TOOLKIT, fairseq.TOOLKIT)


def toolkit_of(content: Any) -> Toolkit | None:
    """The toolkit that wrote a PyTorch file with this content, if it is one of those known here."""
    if not isinstance(content, dict):
        return None
    return next((toolkit for toolkit in _TOOLKITS if toolkit.recognises(content)), None)


def of_toolkit(path: Path, toolkit: Toolkit, content: Any) -> StoredWeights:
    """The checkpoint of another toolkit, under its own names."""
    described = toolkit.describe(path, content)
    config = described.config
    ties = rules.aliases(registry.weight_table(config.architecture, config))

    def stored() -> LazyState:
        states = dict(pt.states(path, described.states))
        for file in described.weights:
            part = safetensors.scan(file)
            for name in part.keys() & states.keys():
                raise InputError(f"{file}: has {shown(name)}, and another file has it, too")
            states |= part
        return {name: tensor for name, tensor in states.items() if name not in described.ignored}

    def scan() -> LazyState:
        """Add tied copies that the file leaves out."""
        tensors = stored()
        left_out = {name: tensors[of] for name, of in ties.items() if of in tensors}
        return left_out | dict(tensors)

    infos = {name: tensor.info for name, tensor in scan().items()}
    derived = [
        Note(name, f"repeats {ties[name]}, with which the model ties it")
        for name in infos.keys() - stored().keys()
    ]
    keys = {keys[0] for keys in described.states.values()}
    others = [Note(str(name), "not part of the weights") for name in content if name not in keys]
    ignored = [Note(name, reason) for name, reason in described.ignored.items()]
    return StoredWeights(
        Kind.PT,
        path,
        f"{path} ({toolkit.title})",
        infos,
        scan,
        config,
        files=(path, *described.weights, *described.files),
        dropped=(*ignored, *others),
        derived=tuple(derived),
        vocabularies=described.vocabularies,
    )


def of_marian(model: marian_files.Model, *, for_transformers: bool = False) -> StoredWeights:
    """A model of Marian under transformers' names, with the row of zeros for padding.

    With ``for_transformers``, its configuration has the positions and norms that transformers
    computes, and not Marian's.
    """
    with about_file(model.path):
        config = marian_names.configuration(model.options)
        weights = marian_names.state(model.arrays, config)
    eos_id = marian_files.end_id(model)
    with about_file(model.vocabularies[-1] if model.vocabularies else model.path):
        config = replace(config, eos_id=eos_id)
    if for_transformers:
        config = marian_names.as_transformers_computes(config)
    tensors = huggingface_state.complete(
        {name: tensor.info for name, tensor in weights.items()}, config
    )
    derived = tuple(
        Note(name, huggingface_state.why_completed(name, config))
        for name in tensors
        if name not in weights
    )
    return StoredWeights(
        Kind.MARIAN,
        model.path,
        str(model.path),
        tensors,
        lambda: huggingface_state.complete(weights, config),
        config,
        weights=model.path.name,
        files=model.files,
        derived=derived,
        marian=model,
    )


def of_t5x(path: Path, scan_axis: int | None) -> StoredWeights:
    """A checkpoint of T5X under this project's names; the configuration is that of ``config.gin``,
    if it is there.
    """
    opened = t5x_checkpoint.find(path)
    gin = gin_config.find(path)
    weights = opened.weights
    infos = {name: tensor.info for name, tensor in weights.items()}
    with about_file(path):
        layout = t5x_names.find(infos, gin.scan_axis if scan_axis is None else scan_axis)
        config = gin_config.configuration(layout, gin) if gin.activations else None
    table = t5x_names.table(layout)
    tensors = {
        name: TensorInfo(rule.flax_shape, infos[rule.stored].dtype)
        for rule in table
        for name in rule.flax
    }
    return StoredWeights(
        Kind.T5X,
        path,
        str(path),
        tensors,
        lambda: stacked.to_flax(table, weights),
        config,
        files=(*opened.files, *((gin.path,) if gin.path else ())),
        dropped=tuple(_not_weights(opened)),
        t5x=layout,
    )


def _not_weights(opened: t5x_checkpoint.Checkpoint) -> Iterator[Note]:
    """The arrays that are no weights, counted by the part of T5X's state that they belong to."""
    parts: dict[str, list[str]] = {}
    for name in opened.arrays:
        if not name.startswith(t5x_checkpoint.TARGET):
            words = name.split(".")
            parts.setdefault(".".join(words[: 2 if words[0] == "state" else 1]), []).append(name)
    for part, names in parts.items():
        if part == "state.step":
            yield Note(part, "the place in training")
            continue
        kinds_of = sorted({name.rpartition(".")[2] for name in names})
        listed = ", ".join(kinds_of[:6])
        yield Note(
            f"{part} ({len(names)} arrays: {listed})",
            "the optimizer's state, which no optimizer here continues"
            if part == "state.param_states"
            else "no weights of the model",
        )
