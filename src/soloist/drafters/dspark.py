"""DSpark: one pass of a small block backbone drafts a whole block, and a Markov head makes its tokens follow each other.

Without Markov and confidence head this is DFlash.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from soloist.dist.vocabulary import Logits
from soloist.drafters.backlog import Backlog, Seen
from soloist.drafters.calibration import DSPARK_FILE, read_temperatures, tempered
from soloist.drafters.drafter import Draw
from soloist.drafters.dspark_formats import IGNORED, DraftConfig, destinations, read_draft_config
from soloist.drafters.dspark_model import DsparkModel
from soloist.errors import UserError
from soloist.layers.linear import prepare
from soloist.models.decoder import Decoder, Output
from soloist.state.buffers import Buffers
from soloist.state.sequence import Sequence, Window
from soloist.weights.checkpoint import Checkpoint
from soloist.weights.loader import Names, fill
from soloist.weights.shard import read_bytes


class DsparkDrafter:
    """Always runs the block it was trained with: slots see each other, so fewer slots would change all of them.

    draft_ids [Vd]: the vocabulary's ids of a reduced vocabulary, None for a whole one; temperatures [K] divide the
    confidence logits. `confidence` is that of the last proposal; places that it did not reach keep older values.
    """

    name = "dspark"
    foresees = False

    def __init__(
        self, model: DsparkModel, width: int, draft_ids: torch.Tensor | None, temperatures: torch.Tensor
    ):
        self.model, self.width = model, width
        self.taps, self.draft_ids, self.temperatures = model.config.taps, draft_ids, temperatures
        self.confidence: torch.Tensor | None = None
        self.law: torch.Tensor | None = None
        self._backlog = Backlog()

    def bind(self, model: Decoder, sequence: Sequence, bufs: Buffers) -> None:
        self._target, device, c = model, bufs.anchor.device, self.model.config
        self._caches = [sequence.add(spec) for layer in self.model.layers for spec in layer.cache_specs()]
        self._masks = torch.full((c.block_size - 1,), c.mask_token_id, device=device)
        self._state = torch.zeros(1, c.markov_rank, dtype=model.dtype, device=device)
        if c.confidence:
            self.confidence = torch.ones(self.width, device=device)

    def reset(self) -> None:
        self._backlog.clear()
        if self.confidence is not None:
            self.confidence.fill_(1.0)

    def observe(self, out: Output, following: torch.Tensor, n: torch.Tensor) -> None:
        """Rows from n on lie beyond the committed places, where no block looks."""
        self._see(self._backlog.add(out, following, n))

    def _see(self, passes: Iterable[Seen]) -> None:
        for out, _, _ in passes:
            self.model.context(out.taps, out.window, self._caches)

    def propose(self, bufs: Buffers, window: Window, draw: Draw) -> torch.Tensor:
        self._see(self._backlog.passes())
        ids = torch.cat((bufs.anchor, self._masks))
        hidden = self.model.block(self._target.embed(ids), window, self._caches)
        first = 0 if self.model.config.anchor_first else 1
        hidden = hidden[first : first + window.width]
        logits = self._score(hidden)
        token, state = bufs.anchor, self._state
        tokens, laws, memories = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        for slot in range(window.width):
            row = logits.columns[slot : slot + 1]
            if self.model.markov is not None:
                memories.append(self.model.markov.memory(token))
                bias, state = self.model.markov(hidden[slot : slot + 1], memories[-1], state)
                row = row + bias
            token, law = draw(self._known(Logits(row, logits.size)), window.positions[slot : slot + 1] + 1)
            tokens.append(token)
            laws += [] if law is None else [law]
        self.law = torch.cat(laws) if laws else None
        if self.confidence is not None:
            self.confidence[: window.width] = tempered(self._sure(hidden, memories), self.temperatures[: window.width])
        return torch.cat(tokens)

    def _sure(self, hidden: torch.Tensor, memories: list[torch.Tensor]) -> torch.Tensor:
        """Logits [K] of the chances that the slots' drafts are accepted; each knows the tokens before its slot only."""
        assert self.model.confidence is not None
        parts = [hidden, torch.cat(memories)] if self.model.config.confidence_with_markov else [hidden]
        logits: torch.Tensor = self.model.confidence(torch.cat(parts, -1).float())
        return logits[:, 0]

    def _score(self, hidden: torch.Tensor) -> Logits:
        """By the model's head, whose columns ranks may share, or the drafter's own."""
        if self.model.head is None:
            return self._target.score(hidden)
        return Logits(self.model.head.logits(hidden), self.model.config.draft_vocab_size)

    def _known(self, logits: Logits) -> Logits:
        """Logits over the model's vocabulary; tokens that the drafter does not know are impossible."""
        if self.draft_ids is None:
            return logits
        everything = logits.whole.new_full((1, self._target.config.vocab_size), float("-inf"))
        return Logits(everything.index_copy(1, self.draft_ids, logits.whole), everything.shape[1])


def build_dspark(checkpoint: Checkpoint, decoder: Decoder, most: int) -> DsparkDrafter:
    """Load a drafter for a model; it drafts at most `most` tokens a round.

    Raises: UserError for files that are no such drafter, or that were made for another model.
    """
    config = read_config(checkpoint)
    try:
        _check_target(config, decoder)
    except UserError as error:
        raise UserError(f"{checkpoint.path}: {error}") from error
    device = decoder.embed.weight.device
    model = DsparkModel(config, decoder.dtype, device, decoder.group)
    fill(model, Names(destinations(config, checkpoint.tensors), IGNORED), checkpoint)
    prepare(model)
    draft_ids = _draft_ids(checkpoint, config)
    temperatures = torch.tensor(_temperatures(checkpoint, config), device=device)
    width = min(most, config.num_drafts)
    return DsparkDrafter(model.eval(), width, None if draft_ids is None else draft_ids.to(device), temperatures)


def read_config(checkpoint: Checkpoint) -> DraftConfig:
    """What the drafter's files say of it.   Raises: UserError for files that are no drafter we can run."""
    try:
        return read_draft_config(checkpoint.config, checkpoint.tensors)
    except UserError as error:
        raise UserError(f"{checkpoint.path}: {error}") from error


def _check_target(config: DraftConfig, decoder: Decoder) -> None:
    target = decoder.config
    pairs = (("hidden_size", config.hidden_size, target.hidden_size), ("vocab_size", config.vocab_size, target.vocab_size))
    for name, found, expected in pairs:
        if found != expected:
            raise UserError(f"the drafter has {name}={found}, the model {expected}: it was made for another model")
    if config.num_target_layers not in (None, target.num_layers):
        raise UserError(
            f"the drafter was made for a model of {config.num_target_layers} layers, this one has {target.num_layers}"
        )
    if config.taps[-1] >= target.num_layers - 1:
        raise UserError(
            f"the drafter reads layers {list(config.taps)} of the model, which has {target.num_layers}; readable are 0 to "
            f"{target.num_layers - 2} (of the last one it is not known whether the norm is meant)"
        )
    if config.mask_token_id >= target.vocab_size:
        raise UserError(f"the drafter has mask_token_id={config.mask_token_id}; the vocabulary ends at {target.vocab_size - 1}")
    if config.draft_vocab_size > target.vocab_size:
        raise UserError(f"the drafter has draft_vocab_size={config.draft_vocab_size}, the model only {target.vocab_size}")


def _draft_ids(checkpoint: Checkpoint, config: DraftConfig) -> torch.Tensor | None:
    """The ids of a reduced vocabulary. d2t holds what is to be added to an index to make its id."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    info = checkpoint.tensors.get("d2t")
    if info is None or info.dtype != "I64" or info.shape != (config.draft_vocab_size,):
        raise UserError(
            f"{checkpoint.path}: draft_vocab_size={config.draft_vocab_size} of {config.vocab_size} needs a tensor d2t with "
            "that many int64 values"
        )
    ids = torch.arange(config.draft_vocab_size) + read_bytes(info).view(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or ids.unique().numel() != ids.numel():
        raise UserError(f"{checkpoint.path}: d2t leads to ids outside the vocabulary, or twice to the same")
    return ids


def _temperatures(checkpoint: Checkpoint, config: DraftConfig) -> list[float]:
    """Of the calibration beside the weights, which must have one for each drafted place. Ones without it."""
    path = checkpoint.path / DSPARK_FILE
    values = read_temperatures(path)
    if values is None:
        return [1.0] * config.num_drafts
    if len(values) != config.num_drafts:
        raise UserError(f"{path}: {len(values)} temperatures for a drafter of {config.num_drafts} places; fit them anew")
    return values
