"""Encoded documents, and batches cut from them in an order that depends only on seed and step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from soloist.errors import UserError


@dataclasses.dataclass
class Documents:
    """Token ids of many documents, end to end. ids uint16 [N]; lengths uint32 [documents]."""

    ids: np.ndarray
    lengths: np.ndarray

    def save(self, path: Path) -> None:
        """Write as .npz."""
        np.savez(path, ids=self.ids, lengths=self.lengths)


def load_documents(paths: list[Path]) -> Documents:
    """Read and join .npz files. Raises: UserError where one is missing."""
    for path in paths:
        if not path.exists():
            raise UserError(f"no encoded documents at {path}; run train nano's corpus step first")
    parts = [np.load(path) for path in paths]
    return Documents(np.concatenate([p["ids"] for p in parts]), np.concatenate([p["lengths"] for p in parts]))


class Batches:
    """Sequences of `length + 2` tokens from documents shuffled anew in every epoch (two extra for the MTP labels).

    `batch(step)` is a pure function of (documents, seed, step): resuming needs no state.
    """

    def __init__(self, documents: Documents, batch: int, length: int, seed: int) -> None:
        self.documents, self.batch_size, self.length, self.seed = documents, batch, length, seed
        self.per_epoch = (len(documents.ids) - 2) // length // batch
        if self.per_epoch < 1:
            raise UserError(
                f"{len(documents.ids)} tokens do not fill one batch of {batch} x {length}; use more text or smaller batches"
            )
        self.starts = np.concatenate([[0], np.cumsum(documents.lengths)[:-1]]).astype(np.int64)
        self._epoch = -1
        self._stream = documents.ids

    def _load_epoch(self, epoch: int) -> None:
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.starts))
        lengths = self.documents.lengths[order].astype(np.int64)
        # positions of the shuffled stream: start of each document, counted up inside it
        ends = np.cumsum(lengths)
        index = np.arange(ends[-1]) + np.repeat(self.starts[order] - (ends - lengths), lengths)
        self._stream, self._epoch = self.documents.ids[index], epoch

    def batch(self, step: int) -> Tensor:
        """Token ids [B, length + 2] int64 on the host."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._load_epoch(epoch)
        rows = [
            self._stream[s * self.length : s * self.length + self.length + 2]
            for s in range(index * self.batch_size, (index + 1) * self.batch_size)
        ]
        return torch.from_numpy(np.stack(rows).astype(np.int64))
