"""Faults of the weight tables and of the engine that applies them."""

from benchmarks.mutants_fault import Mutant, level

_RULES, _TENSORS, _PAGES = (
    "jax_transformer/weights/rules.py",
    "jax_transformer/storage/tensors.py",
    "jax_transformer/architectures",
)
_SELF = "encoder.blocks.0.self_attention"
_UNIT = "parity_tests/unit/test_rules.py"
_BITS = "parity_tests/test_convert.py::test_weights_round_trip_bit_for_bit"

MUTANTS = [
    Mutant(
        "a square kernel not transposed",
        _RULES,
        '(f"{flax}.kernel",), Each.TRANSPOSE), *biases]',
        '(f"{flax}.kernel",)), *biases]',
        level("logits", "lesson10 square"),
        f"{_SELF}.out",
        case="lesson10 square",
        met="untransposed square kernel, whose shape reveals nothing",
    ),
    Mutant(
        "a packed square kernel not transposed",
        _RULES,
        'Rule(f"{torch}.in_proj_weight", kernels, Each.TRANSPOSE)',
        'Rule(f"{torch}.in_proj_weight", kernels)',
        level("attention", "lesson10 square"),
        _SELF,
        case="lesson10 square",
        met="untransposed square kernel",
    ),
    Mutant(
        "packed values, keys, queries",
        _RULES,
        'Rule(f"{torch}.in_proj_weight", kernels,',
        'Rule(f"{torch}.in_proj_weight", kernels[::-1],',
        level("attention"),
        _SELF,
        met="swapped Q/K/V",
    ),
    Mutant(
        "packed biases in another order",
        _RULES,
        '[Rule(f"{torch}.in_proj_bias", biases)]',
        '[Rule(f"{torch}.in_proj_bias", (biases[0], biases[2], biases[1]))]',
        level("attention"),
        _SELF,
        met="swapped Q/K/V, only in the biases",
    ),
    Mutant(
        "fused heads read as three matrices",
        _RULES,
        "kernels, Each.TRANSPOSE, Several.PER_HEAD, heads)]",
        "kernels, Each.TRANSPOSE)]",
        level("encoder", "part2_encoder_repaired"),
        _SELF,
        case="part2_encoder_repaired",
        met="head order: [h, 3, e] and [3, h, e]",
    ),
    Mutant(
        "fused biases read as three vectors",
        _RULES,
        "biases, several=Several.PER_HEAD, heads=heads)]",
        "biases)]",
        level("encoder", "part2_encoder_repaired"),
        _SELF,
        case="part2_encoder_repaired",
        met="head order, only in the biases",
    ),
    Mutant(
        "fused heads counted the other way",
        _RULES,
        "tensor.reshape(self.heads, -1, *tensor.shape[1:])",
        "tensor.reshape(-1, self.heads, *tensor.shape[1:]).swapaxes(0, 1)",
        level("encoder", "part2_encoder_repaired"),
        _SELF,
        case="part2_encoder_repaired",
        met="head order permuted",
    ),
    Mutant(
        "a norm's scale and bias exchanged",
        _RULES,
        "scale, shift = names",
        "shift, scale = names",
        level("norm"),
        "encoder.blocks.0.residuals.0.norm",
        met="swapped names, which zeros and ones do not show",
    ),
    Mutant(
        "layers in reverse",
        _RULES,
        "return [rule.numbered(i) for i in range(layers) for rule in rules]",
        "return [replace(rule.numbered(i), torch=rule.numbered(layers - 1 - i).torch)"
        " for i in range(layers) for rule in rules]",
        level("encoder_block"),
        None,
        met="layer 10 sorted before layer 2",
    ),
    Mutant(
        "an embedding transposed",
        _RULES,
        'return [Rule(f"{torch}.weight", (f"{flax}.embedding",))]',
        'return [Rule(f"{torch}.weight", (f"{flax}.embedding",), Each.TRANSPOSE)]',
        level("logits", "lesson10 square"),
        "source_embedding",
        case="lesson10 square",
        met="transposed embedding",
    ),
    Mutant(
        "unexpected tensors ignored",
        _TENSORS,
        "sorted(tensors.keys() - expected.keys())",
        "sorted(tensors.keys() - tensors.keys())",
        (f"{_UNIT}::test_one_error_names_everything_that_does_not_fit",),
        met="ignored key",
    ),
    Mutant(
        "missing tensors newly initialised",
        _RULES,
        "    infos = {name: TensorInfo(",
        (
            "    expected = torch_shapes(table, flax_shapes)\n"
            "    zeros = {name: np.zeros(shape) for name, shape in expected.items()}\n"
            "    state = zeros | dict(state)\n"
            "    infos = {name: TensorInfo("
        ),
        (f"{_UNIT}::test_one_error_names_everything_that_does_not_fit",),
        met='"newly initialized"',
    ),
    Mutant(
        "shapes not compared",
        _TENSORS,
        "if tensors[name].shape != expected[name]:",
        "if np.prod(tensors[name].shape) != np.prod(expected[name]):",
        (f"{_UNIT}::test_one_error_names_everything_that_does_not_fit",),
        met="ignore_mismatched_sizes",
    ),
    Mutant(
        "a tied copy may drift",
        _TENSORS,
        "not same(state[name], state[other])",
        "state[name].shape != state[other].shape",
        (f"{_UNIT}::test_tied_copies_that_differ_are_named",),
        met="tied copy that drifts",
    ),
    Mutant(
        "a copy on our side may drift",
        _RULES,
        "if not tensors.same(array, arrays[0]):",
        "if array.shape != arrays[0].shape:",
        (f"{_UNIT}::test_flax_copies_that_differ_are_named",),
        met="tied copy that drifts",
    ),
    Mutant(
        "arrays share the checkpoint's memory",
        _RULES,
        "return [_owned(part, tensor) for part in parts]",
        "return parts",
        (f"{_UNIT}::test_converted_arrays_are_contiguous_and_share_no_memory",),
        met="an in-place update that changes both models",
    ),
    Mutant(
        "tensors are strided views",
        _RULES,
        "return tensors.contiguous(self._join(parts) if len(parts) > 1 else parts[0])",
        "return self._join(parts) if len(parts) > 1 else parts[0]",
        (f"{_UNIT}::test_converted_arrays_are_contiguous_and_share_no_memory",),
        met="safetensors writes other bytes for a transposed view",
    ),
    Mutant(
        "packed parts joined in reverse",
        _RULES,
        "return np.concatenate(parts)",
        "return np.concatenate(parts[::-1])",
        (f"{_BITS}[lesson10-torch.float64]",),
        met="only one direction of a converter is right",
    ),
    Mutant(
        "rules restricted by overlap",
        _RULES,
        "names.issuperset(rule.flax)",
        "not names.isdisjoint(rule.flax)",
        (f"{_UNIT}::test_restrict_keeps_the_rules_of_the_trained_arrays",),
        met="moments of arrays that are not trained",
    ),
    Mutant(
        "cross-attention's keys and values swapped",
        f"{_PAGES}/deep_dive.py",
        ('"key": "W_Encoder_Decoder_keys",\n    "value": "W_Encoder_Decoder_values"'),
        ('"key": "W_Encoder_Decoder_values",\n    "value": "W_Encoder_Decoder_keys"'),
        level("cross_attention", "deep_dive"),
        "decoder.blocks.0.cross_attention",
        case="deep_dive",
        met="swapped K and V",
    ),
    Mutant(
        "a block's two norms exchanged",
        f"{_PAGES}/torch_nn.py",
        'f"{name}.blocks.{{i}}.residuals.{k}.norm"',
        'f"{name}.blocks.{{i}}.residuals.{len(stack.branches) - 1 - k}.norm"',
        level("encoder_block"),
        "encoder.blocks.0",
        met="norm1 and norm2",
    ),
    Mutant(
        "the stacks' learned positions exchanged",
        f"{_PAGES}/torch_nn.py",
        '{"encoder": "src_pos", "decoder": "tgt_pos"}',
        '{"encoder": "tgt_pos", "decoder": "src_pos"}',
        level("encoder", "torch.nn learned positions"),
        None,
        case="torch.nn learned positions",
        met="two tables of one shape",
    ),
    Mutant(
        "the stacks' embeddings exchanged",
        f"{_PAGES}/torch_nn.py",
        'embedding("src_emb", "source_embedding")',
        'embedding("src_emb", "target_embedding")',
        (f"{_BITS}[lesson10 square-torch.float64]",),
        met="two tables of one shape",
    ),
    Mutant(
        "the shared block's second norm is its first",
        f"{_PAGES}/blog2023.py",
        'f"{flax}.residuals.{first}.norm"),\n        *linear(f"{torch}.feed_forward.0"',
        'f"{flax}.residuals.{first + 1}.norm"),\n        *linear(f"{torch}.feed_forward.0"',
        level("encoder", "blog2023"),
        None,
        case="blog2023",
        met="two rules for one array",
    ),
    Mutant(
        "queries and values named as each other",
        f"{_PAGES}/from_scratch.py",
        (
            '"query": "queries_transform",\n'
            '    "key": "keys_transform",\n'
            '    "value": "values_transform"'
        ),
        (
            '"query": "values_transform",\n'
            '    "key": "keys_transform",\n'
            '    "value": "queries_transform"'
        ),
        level("attention", "from_scratch square"),
        _SELF,
        case="from_scratch square",
        met="swapped Q/K/V",
    ),
    Mutant(
        "the norm before the block is the block's",
        f"{_PAGES}/from_scratch.py",
        '*layer_norm(f"{torch}.norm", f"{flax}.residuals.0.norm", bias=config.bias),\n        '
        '*_transformer_block(f"{torch}.transformer_block", flax, Part.CROSS, 1, config),',
        '*layer_norm(f"{torch}.norm", f"{flax}.residuals.2.norm", bias=config.bias),\n        '
        '*_transformer_block(f"{torch}.transformer_block", flax, Part.CROSS, 0, config),',
        level("decoder_block", "from_scratch"),
        "decoder.blocks.0",
        case="from_scratch",
        met="norms numbered in another order",
    ),
]
