"""Tables proposed for strangers' ports, beside transformers' modules with random weights.

``git clone https://github.com/jax-ml/bonsai``, likewise google/tunix and
google-deepmind/recurrentgemma, then ``python -m campaigns.ports bonsai tunix recurrentgemma
[--only NAME ...] [--write docs/ports.md]``. Nothing of the ports is here: each is built at small
sizes from the names of its own configuration. The exit code is 1 if a port gets no table that
converts.
"""

import argparse
import dataclasses
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from benchmarks import pages
from jax_transformer import weights
from jax_transformer.parity.proposal import Proposal
from jax_transformer.weights import Rule

COLUMNS = ["port", "kind", "tensors", "without a rule", "rules proven", "outputs", "s"]
IMAGE, IDS, WIDTH, HEADS, INNER, LABELS = (2, 8, 8, 3), (2, 7), 16, 2, 24, 5
PORTS: dict[str, tuple[str, Callable[[], tuple]]] = {}


def port(kind: str) -> Callable:
    """Register a function that returns both models, a batch, and the calls of both."""

    def register(make: Callable[[], tuple]) -> Callable[[], tuple]:
        PORTS[make.__name__] = kind, make
        return make

    return register


def bonsai(name: str) -> Any:
    return importlib.import_module(f"bonsai.models.{name}.modeling")


def tunix(name: str) -> Any:
    """A model's module, without the package's own, which asks for all that its trainers need."""
    for package in ("tunix", f"tunix.models.{name}"):
        if (spec := importlib.util.find_spec(package)) is None:
            raise ModuleNotFoundError(package)
        sys.modules.setdefault(package, importlib.util.module_from_spec(spec))
    return importlib.import_module(f"tunix.models.{name}.model")


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def ids(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(1, 50, shape).astype(np.int32)


def randomized(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Zero biases and unit scales hide faults, and small weights those of activations."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            random = torch.randn(tensor.shape, generator=generator)
            if name.endswith("running_var"):
                tensor.copy_(random.abs() + 0.5)
            elif tensor.ndim > 1:
                tensor.copy_(random / tensor[0].numel() ** 0.5)
            else:
                tensor.add_(0.3 * random)
    return module.eval()


def of_image(module: Any, x: Any) -> Any:
    return module(x.permute(0, 3, 1, 2)).logits


@port("vision")
def vit() -> tuple:
    names = dict(num_heads=HEADS, mlp_dim=INNER, num_layers=3, num_labels=LABELS, eps=1e-12)
    rates, sizes = dict(attn_dropout_prob=0.0, dropout_prob=0.0), ((8, 8), (4, 4), 3, WIDTH)
    fields = ("image_size", "patch_size", "num_channels", "hidden_dim")
    config = bonsai("vit").ModelConfig(**dict(zip(fields, sizes, strict=True)), **names, **rates)
    ours = bonsai("vit").ViTClassificationModel(config, rngs=nnx.Rngs(0))
    theirs = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=LABELS, **small(3))
    theirs = transformers.ViTForImageClassification(theirs)
    return theirs, ours, [normal(*IMAGE)], lambda model, x: model(x, rngs=None), of_image


def small(layers: int) -> dict[str, Any]:
    names = ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers")
    return dict(zip(names, (WIDTH, HEADS, INNER, layers), strict=True))


@port("vision")
def dinov3() -> tuple:
    sizes = small(2) | dict(image_size=8)
    config = bonsai("dinov3").ModelConfig(patch_size=(4, 4), **sizes)
    ours = bonsai("dinov3").Dinov3ViTModel(config, nnx.Rngs(0))
    theirs = transformers.DINOv3ViTConfig(patch_size=4, num_register_tokens=4, **sizes)
    return transformers.DINOv3ViTModel(theirs), ours, [normal(2, 3, 8, 8)], None, None


@port("convolutions")
def convnext() -> tuple:
    depths, widths = [1, 2, 1, 1], [4, 6, 8, 10]
    config = bonsai("convnext").ModelConfig(depths, widths, 0.0, LABELS)
    ours = bonsai("convnext").ConvNeXt(config, rngs=nnx.Rngs(0))
    theirs = transformers.ConvNextConfig(depths=depths, hidden_sizes=widths, num_labels=LABELS)
    theirs = transformers.ConvNextForImageClassification(theirs)
    return theirs, ours, [normal(2, 32, 32, 3)], lambda model, x: model(x, rngs=None), of_image


@port("convolutions")
def resnet() -> tuple:
    depths = [1, 2, 1, 1]
    ours = bonsai("resnet").ResNet(bonsai("resnet").ModelConfig(depths, LABELS), rngs=nnx.Rngs(0))
    theirs = transformers.ResNetConfig(depths=depths, num_labels=LABELS)
    theirs = transformers.ResNetForImageClassification(theirs)
    return theirs, ours, [normal(2, 40, 40, 3)], None, of_image


@port("convolutions")
def efficientnet() -> tuple:
    module, epsilon = bonsai("efficientnet"), 1e-3
    inputs, outputs, kernels, repeats = [32, 16], [16, 24], [3, 5], [1, 2]
    strides, ratios = [1, 2], [1, 6]
    sizes = zip(inputs, outputs, kernels, repeats, ratios, strides, strict=True)
    blocks = module.BlockConfigs([module.BlockConfig(*each, 0.25, "SAME") for each in sizes])
    config = module.ModelConfig(1.0, 1.0, 32, 0.2, "SAME", 0.1, epsilon, blocks, LABELS)
    theirs = transformers.EfficientNetConfig(
        kernel_sizes=kernels,
        in_channels=inputs,
        out_channels=outputs,
        strides=strides,
        num_block_repeats=repeats,
        expand_ratios=ratios,
        width_coefficient=1.0,
        depth_coefficient=1.0,
        depthwise_padding=[],
        hidden_dim=1280,
        batch_norm_eps=epsilon,
        num_labels=LABELS,
    )
    theirs = randomized(transformers.EfficientNetForImageClassification(theirs), 0)
    ours = module.EfficientNet(config, rngs=nnx.Rngs(0))
    return theirs, ours, [normal(2, 32, 32, 3)], None, of_image


@port("decoder")
def qwen3() -> tuple:
    sizes = dict(vocab_size=50, head_dim=8, tie_word_embeddings=False, rope_theta=1_000_000)
    names = dict(num_layers=2, emb_dim=WIDTH, mlp_dim=INNER, num_heads=4, num_kv_heads=2)
    more = dict(rope_scaling_factor=None, local_rope_theta=None, norm_eps=1e-6)
    config = bonsai("qwen3").ModelConfig(**sizes, **names, **more)

    def call(model: Any, x: Any) -> Any:
        cache = bonsai("qwen3").init_cache(config, *IDS, 2, model.lm_head.kernel.dtype)
        return model(x, cache=cache, segment_ids=jnp.ones(IDS, jnp.int32))

    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**small(2) | heads, **sizes))
    ours = bonsai("qwen3").Qwen3(config, rngs=nnx.Rngs(0))
    return theirs, ours, [ids(*IDS)], call, lambda module, x: module(x).logits


@port("mixture of experts")
def qwen3_moe() -> tuple:
    names = dict(num_layers=2, embed_dim=WIDTH, hidden_dim=INNER, num_heads=4, num_kv_heads=2)
    sizes = dict(vocab_size=50, head_dim=8, num_experts=3, num_experts_per_tok=2)
    config = tunix("qwen3").ModelConfig(**names, **sizes, rope_theta=1_000_000, norm_eps=1e-6)
    ours = tunix("qwen3").Qwen3(config, rngs=nnx.Rngs(0))

    def call(model: Any, x: Any) -> Any:
        positions = jnp.broadcast_to(jnp.arange(IDS[1]), IDS)
        return model(x, positions, None, jnp.tril(jnp.ones((2, 7, 7), bool)))[0]

    sizes |= small(2) | dict(num_attention_heads=4, num_key_value_heads=2, norm_topk_prob=True)
    sizes |= dict(moe_intermediate_size=INNER, rope_theta=1_000_000)
    theirs = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    return theirs, ours, [ids(*IDS)], call, lambda module, x: module(x).logits


@port("RNN")
def recurrentgemma() -> tuple:
    griffin = importlib.import_module("recurrentgemma.jax").Griffin
    code = importlib.import_module("recurrentgemma.common")
    kinds, fields = ("recurrent", "attention"), ("width", "mlp_expanded_width", "num_heads")
    sizes = dict(vocab_size=50, logits_soft_cap=30.0, attention_window_size=8, lru_width=20)
    blocks = tuple(code.TemporalBlockType[kind.upper()] for kind in kinds)
    names = dict(zip(fields, (WIDTH, INNER, HEADS), strict=True))
    names |= dict(block_types=blocks, embeddings_scale_by_sqrt_dim=True)
    module = griffin(code.GriffinConfig(**sizes, **names), gradient_checkpointing=False)
    positions = jnp.broadcast_to(jnp.arange(IDS[1]), IDS)
    call = lambda model, x: model(x, positions, return_cache=False)[0]  # noqa: E731
    variables = module.init(jax.random.key(0), jnp.asarray(ids(*IDS)), positions)
    sizes |= small(2) | dict(intermediate_size=2 * INNER, block_types=kinds, head_dim=8)
    theirs = transformers.RecurrentGemmaConfig(**sizes, num_key_value_heads=1, use_cache=False)
    theirs = transformers.RecurrentGemmaForCausalLM(theirs)
    return theirs, (module, variables), [ids(*IDS)], call, lambda model, x: model(x).logits


@port("vision")
def qwen3_vl() -> tuple:
    module, theirs = bonsai("qwen3_vl"), transformers.models.qwen3_vl.modeling_qwen3_vl
    deep, grid = (0, 1), np.array([[1, 4, 8]])
    sizes = dict(depth=3, hidden_size=WIDTH, intermediate_size=INNER, num_heads=HEADS)
    sizes |= dict(patch_size=2, out_hidden_size=24, num_position_embeddings=36)
    ours = module.Qwen3VLVisionConfig(**sizes, deepstack_visual_indexes=deep)
    ours = module.Qwen3VLVisionModel(ours, rngs=nnx.Rngs(0))
    config = theirs.Qwen3VLVisionConfig(**sizes, deepstack_visual_indexes=deep)
    theirs = randomized(theirs.Qwen3VLVisionModel(config), 0)

    def call(model: Any, x: Any) -> Any:
        merged, features = model(x, grid)
        return {"merged": merged, "first": features[0], "second": features[1]}

    def call_torch(model: Any, x: Any) -> Any:
        result = model(x, grid_thw=torch.tensor(grid))
        first, second = result.deepstack_features
        return {"merged": result.pooler_output, "first": first, "second": second}

    return theirs, ours, [normal(32, 24)], call, call_torch


@port("encoder-decoder")
def umt5() -> tuple:
    sizes = dict(vocab_size=50, d_model=WIDTH, d_kv=4, d_ff=INNER, num_heads=3, dropout_rate=0.0)
    sizes |= dict(num_layers=2, num_decoder_layers=2)
    ours = bonsai("umt5").UMT5Model(bonsai("umt5").ModelConfig(**sizes), rngs=nnx.Rngs(0))
    theirs = transformers.UMT5Model(transformers.UMT5Config(**sizes))

    def call(model: Any, source: Any, target: Any) -> Any:
        return model(input_ids=source, decoder_input_ids=target)

    return theirs, ours, [ids(*IDS), ids(2, 5)], call, call


@port("state space")
def mamba2() -> tuple:
    sizes = dict(vocab_size=50, hidden_size=WIDTH, state_size=8, num_hidden_layers=2, head_dim=8)
    sizes |= dict(expand=2, chunk_size=4, tie_word_embeddings=True)
    ours = bonsai("mamba2").Mamba2ForCausalLM(
        bonsai("mamba2").ModelConfig(**sizes), rngs=nnx.Rngs(0)
    )
    theirs = transformers.Mamba2Config(num_heads=4, n_groups=1, **sizes)
    theirs = transformers.Mamba2ForCausalLM(theirs)
    calls = (lambda model, x: model(x)["logits"]), (lambda module, x: module(x).logits)
    return theirs, ours, [ids(2, 8)], *calls


def whisper(part: str) -> tuple[Any, Any]:
    """The configuration, and transformers' encoder or decoder."""
    sizes = dict(vocab_size=50, d_model=WIDTH, encoder_layers=2, decoder_layers=2, dropout=0.0)
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_attention_heads": 4, f"{side}_ffn_dim": INNER}
    sizes |= dict(num_mel_bins=6, max_source_positions=10, max_target_positions=9, pad_token_id=0)
    theirs = transformers.WhisperConfig(bos_token_id=1, eos_token_id=2, **sizes)
    values = theirs.to_dict() | {"max_length": 9, "num_hidden_layers": 2}
    names = [field.name for field in dataclasses.fields(bonsai("whisper").ModelConfig)]
    config = bonsai("whisper").ModelConfig(**{name: values.get(name) for name in names})
    return config, getattr(transformers.WhisperModel(theirs), part)


@port("speech")
def whisper_encoder() -> tuple:
    config, theirs = whisper("encoder")
    ours = bonsai("whisper").WhisperEncoder(config, rngs=nnx.Rngs(0))
    return theirs, ours, [normal(2, 20, 6)], None, lambda module, x: module(x.transpose(1, 2))


@port("speech")
def whisper_decoder() -> tuple:
    config, theirs = whisper("decoder")
    ours = bonsai("whisper").WhisperDecoder(config, rngs=nnx.Rngs(0))

    def call(model: Any, x: Any, memory: Any) -> Any:
        return model(x, nnx.make_causal_mask(jnp.ones(IDS)), memory, None, False)

    def call_torch(module: Any, x: Any, memory: Any) -> Any:
        return module(input_ids=x, encoder_hidden_states=memory)

    return theirs, ours, [ids(*IDS), normal(2, 4, WIDTH)], call, call_torch


@port("video")
def vjepa2() -> tuple:
    sizes = dict(hidden_size=24, num_attention_heads=2, num_hidden_layers=2, crop_size=8)
    sizes |= dict(patch_size=4, frames_per_clip=4, pred_hidden_size=12, num_pooler_layers=1)
    sizes |= dict(pred_num_attention_heads=2, pred_num_hidden_layers=2, num_labels=LABELS)
    config = bonsai("vjepa2").ModelConfig(**sizes)
    ours = bonsai("vjepa2").VJEPA2ForVideoClassification(config, nnx.Rngs(0))
    theirs = transformers.VJEPA2ForVideoClassification(transformers.VJEPA2Config(**sizes))
    calls = (
        (lambda model, x: model(x)["logits"]),
        (lambda module, x: module(x.permute(0, 1, 4, 2, 3)).logits),
    )
    return theirs, ours, [normal(2, 4, 8, 8, 3)], *calls


def models(name: str) -> tuple:
    """Both models, a batch, and the calls of both."""
    torch.manual_seed(0)
    theirs, ours, *others = PORTS[name][1]()
    if isinstance(ours, nnx.Module):
        ours.eval()
    return theirs.eval(), ours, *others


def proposed(theirs: Any, ours: Any, batch: Any, call_flax: Any, call_torch: Any) -> Proposal:
    return weights.propose(theirs, ours, batch, call_flax=call_flax, call_torch=call_torch)


def row(name: str, proposal: Proposal, seconds: float) -> list[str]:
    rules = [line for line in proposal.entries if isinstance(line.entry, Rule)]
    parameters = [line for line in proposal.entries if line.reason != "no parameter"]
    without = sum(not isinstance(line.entry, Rule) and not line.proven for line in parameters)
    proven = f"{sum(line.proven for line in rules)} of {len(rules)}"
    tensors = sum(hasattr(line.entry, "torch") for line in parameters)
    off = f"{proposal.off_by:.0e}"
    return [name, PORTS[name][0], str(tensors), str(without), proven, off, f"{seconds:.0f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="+", help="folders of the ports' repositories")
    parser.add_argument("--only", nargs="+", choices=list(PORTS))
    parser.add_argument("--faults", action="store_true", help="seed faults into the ports")
    parser.add_argument("--clean", action="store_true", help="count false alarms")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the ports' rows")
    options = parser.parse_args()
    sys.path += options.checkouts
    jax.config.update("jax_platforms", "cpu")
    rows, failed, columns = [], [], COLUMNS
    command = "bonsai tunix recurrentgemma --write"
    if options.faults or options.clean:
        from campaigns import port_faults

        columns, command = port_faults.COLUMNS, "bonsai --faults --write"
        if options.clean:
            columns, command = port_faults.CLEAN_COLUMNS, "bonsai --clean --write"
        for name in options.only or port_faults.PORTS:
            rows.append((port_faults.clean_row if options.clean else port_faults.row)(name))
            print(*rows[-1], flush=True)
    for name in () if options.faults or options.clean else options.only or PORTS:
        began = time.monotonic()
        proposal = proposed(*models(name))
        rows.append(row(name, proposal, time.monotonic() - began))
        failed += [] if proposal.converts else [name]
        marked = [line for line in proposal.lines() if line[0] in "?!"]
        print(f"{name}: {proposal.summary()}", *marked, " ".join(rows[-1]), sep="\n", flush=True)
    if options.write is not None:
        pages.write_rows(options.write, f"python -m campaigns.ports {command}", columns, rows)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
