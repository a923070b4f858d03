"""A translator of our own: torch.nn.Transformer, learned positions, a tied output layer."""

import torch
from torch import Tensor, nn


class MyTranslator(nn.Transformer):
    """Returns logits (b, t, v) for source ids (b, s) and target ids (b, t)."""

    def __init__(
        self, vocabulary: int, width: int, heads: int, layers: int, inner: int, longest: int
    ):
        super().__init__(
            d_model=width,
            nhead=heads,
            num_encoder_layers=layers,
            num_decoder_layers=layers,
            dim_feedforward=inner,
            activation="gelu",
            norm_first=True,
            batch_first=True,
        )
        self.words = nn.Embedding(vocabulary, width)
        self.places_in = nn.Embedding(longest, width)
        self.places_out = nn.Embedding(longest, width)
        self.drop = nn.Dropout(0.1)
        self.to_words = nn.Linear(width, vocabulary, bias=False)
        self.to_words.weight = self.words.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = source == 0
        future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        memory = self.encoder(self._embed(source, self.places_in), src_key_padding_mask=padding)
        states = self.decoder(
            self._embed(target, self.places_out),
            memory,
            tgt_mask=future.to(target.device),
            memory_key_padding_mask=padding,
        )
        return self.to_words(states)

    def _embed(self, ids: Tensor, places: nn.Embedding) -> Tensor:
        return self.drop(self.words(ids) + places.weight[: ids.shape[1]])
