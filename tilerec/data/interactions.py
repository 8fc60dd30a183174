"""`Interactions`: a log as samples with features `user`, `item`, `history` and `seen`.

    log of user 7 in order of time:   a b c d e           max_length = 2, one held-out item per user

    samples = "interactions"   user=7 item=a history=[]      train
                               user=7 item=b history=[a]
                               user=7 item=c history=[a b]
                               user=7 item=d history=[b c]
    samples = "users"          user=7 item=d history=[b c]   train: next items of all positions are known
    both                       user=7 item=[e] history=[c d] seen=[a b c d]   held out

Items and users of the training part have a row each (`ValueRows`). Others are left out: an unknown user has no id, and
histories have no unknown items. A held-out item that is unknown has row 0, and counts as a miss. `item`, `history` and
`seen` share the table `items`. `seen` is empty in training.

Order of a pass: a random permutation of the samples by (seed, epoch), so a pass continues at any position, on any
number of ranks. Memory: 20 bytes per interaction, and 8 per sample of a pass.

Legend: n interactions, U users, B samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as arrow
import torch

from tilerec.data.batch import Batch
from tilerec.data.dataset import Catalog, RowDataset, SparseFeature
from tilerec.data.delimited import RowCount
from tilerec.data.interaction_log import InteractionLog, ValueRows, readable
from tilerec.data.share import Share, bounds, check_shares
from tilerec.data.shuffle import check_seed
from tilerec.errors import ConfigError, InputError
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

KEYS = ("user", "item", "history", "seen")
"""Features of a batch."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LogSplit:
    """Division of a log into a training part and a held-out part.

    Attributes:
        split: "last" holds out the last interactions of each user; "time" holds out the latest interactions of all;
            "random" holds out a random part of each user's; "none" holds out nothing.
        per_user: with "last", the number per user; a user with fewer than twice as many has half of them held out.
        fraction: with "time", the fraction of the interactions; with "random", that of each user's, rounded down.
        seed: with "random", of the choice.
    """

    split: Literal["last", "time", "random", "none"] = "last"
    per_user: int = 1
    fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split not in ("last", "time", "random", "none"):
            raise ConfigError(
                f"hold_out.split: got {self.split!r}; expected 'last', 'time', 'random' or 'none'. Correct it."
            )
        if self.per_user < 1:
            raise ConfigError(f"hold_out.per_user: got {self.per_user}; expected at least 1. Set it higher.")
        if not 0 < self.fraction < 1:
            raise ConfigError(f"hold_out.fraction: got {self.fraction}; expected a number between 0 and 1. Correct it.")

    def held(self, users_n: Ints, times_n: npt.NDArray[Any] | None) -> npt.NDArray[np.bool_]:
        """Return True for held-out interactions.

        Args:
            users_n: number of each user; all interactions of a user are together, in order of time.
            times_n: of the same interactions; None only without a column of times.
        """
        if self.split == "none" or not len(users_n):
            return np.zeros(len(users_n), np.bool_)
        if self.split == "time":
            if times_n is None:
                raise ConfigError(
                    "hold_out.split: got 'time' without data.time; expected the column of times. Set data.time, or use "
                    "split = 'last'."
                )
            # Interactions with one time are on one side, so the part may be a little smaller.
            cut = np.sort(times_n)[min(int(len(times_n) * (1 - self.fraction)), len(times_n) - 1)]
            return times_n > cut if (times_n < cut).sum() == 0 else times_n >= cut
        counts_U = np.bincount(users_n)
        ends_U = np.cumsum(counts_U)
        if self.split == "random":
            # In a random order within each user, the first ones are held out.
            order_n = np.lexsort((np.random.default_rng(self.seed).random(len(users_n)), users_n))
            place_n = np.arange(len(users_n)) - (ends_U - counts_U)[users_n]
            chosen = place_n < np.floor(counts_U * self.fraction).astype(np.int64)[users_n]
            held_n = np.zeros(len(users_n), np.bool_)
            held_n[order_n[chosen]] = True
            return held_n
        held_U = np.minimum(counts_U // 2, self.per_user)
        from_end_n = ends_U[users_n] - np.arange(len(users_n))  # 1 for the last one of a user
        mask: npt.NDArray[np.bool_] = from_end_n <= held_U[users_n]
        return mask


class Interactions(RowDataset):
    """Samples of an interaction log in memory.

    Args:
        log: the interactions.
        samples: "interactions" for a training sample per interaction, "users" for one per user.
        max_length: items of a history, the last ones.
        hold_out: the held-out part.
        vocabulary: rows of users and items by feature; None derives them from the training part.
        seed: of the order of the training samples.
        user_key: name of the column of users in predictions.
        labelled: `rows` takes the last item of each user as `item`; else all items are history.

    Raises:
        InputError: no interactions to train on (without a vocabulary), or values of other types than those of the
            vocabulary.
    """

    def __init__(
        self,
        log: InteractionLog,
        *,
        samples: Literal["interactions", "users"] = "interactions",
        max_length: int = 50,
        hold_out: LogSplit | None = None,
        vocabulary: Mapping[str, pa.Array] | None = None,
        seed: int = 0,
        user_key: str = "user",
        labelled: bool = True,
    ) -> None:
        if max_length < 1:
            raise ConfigError(f"max_length: got {max_length}; expected at least 1. Set the items of a history.")
        check_seed(seed)
        self._samples, self._max_length, self._seed = samples, max_length, seed
        self._user_key, self._labelled = user_key, labelled
        self._count = RowCount(rows=log.rows)
        own_users = ValueRows.of(log.users, "user")
        self._user_values = own_users.values
        users_n = own_users.rows(log.users, log.name) - 1
        order_n = np.lexsort((log.times, users_n)) if log.times is not None else np.argsort(users_n, kind="stable")
        users_n, items = users_n[order_n], log.items.take(pa.array(order_n))
        held_n = (hold_out or LogSplit()).held(users_n, None if log.times is None else log.times[order_n])
        if vocabulary is None:
            trained = pa.array(~held_n)
            if not len(log.users) or held_n.all():
                raise InputError(
                    f"{log.name}: got no interactions to train on; expected some. Hold out less, or add data."
                )
            kept = own_users.values.take(pa.array(np.unique(users_n[~held_n])))
            self._users, self._items = ValueRows(kept, "user"), ValueRows.of(items.filter(trained), "item")
        else:
            self._users, self._items = ValueRows(vocabulary["user"], "user"), ValueRows(vocabulary["item"], "item")
        # Training and held-out interactions apart, each ordered by user and time.
        item_n = self._items.rows(items, log.name).astype(np.int32)
        # A row that no training sample has read has no meaning, so histories have no unknown items.
        trained_n = ~held_n & (item_n > 0)
        self._train = _ByUser(users_n[trained_n], item_n[trained_n], len(self._user_values))
        self._times = None if log.times is None else log.times[order_n][trained_n]
        # A set per user: an item that a user has twice, known or not, is relevant once.
        held_places = np.flatnonzero(held_n)
        codes = arrow.dictionary_encode(items.take(pa.array(held_places))).indices.to_numpy().astype(np.int64)
        pairs = users_n[held_places] * (int(codes.max(initial=0)) + 1) + codes
        held_places = held_places[np.sort(np.unique(pairs, return_index=True)[1])]
        self._held = _ByUser(users_n[held_places], item_n[held_places], len(self._user_values))
        self._row_of_user = self._users.rows(self._user_values, log.name)
        self._ends = self._training_samples()
        self._queries = np.flatnonzero((self._train.counts > 0) & (self._held.counts > 0))

    def _training_samples(self) -> Ints:
        """Return the place of the target of each training sample in the training interactions."""
        if self._samples == "interactions":
            return np.arange(len(self._train.items))
        # A sequence needs an item and a next one.
        return self._train.ends[self._train.counts >= 2] - 1

    @property
    def sparse_features(self) -> tuple[SparseFeature, ...]:
        rows = self._items.num_rows
        return (
            SparseFeature("user", self._users.num_rows, table="users"),
            SparseFeature("item", rows, table="items"),
            SparseFeature("history", rows, table="items", max_length=self._max_length),
            SparseFeature("seen", rows, table="items"),
        )

    @property
    def dense_features(self) -> tuple[str, ...]:
        return ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """No label columns: every interaction is a positive."""
        return ()

    @property
    def column_names(self) -> Sequence[str]:
        return [self._user_key]

    @property
    def default_keys(self) -> Sequence[str]:
        return [self._user_key]

    def train(self, batch_size: int, epoch: int = 0) -> Iterator[Batch]:
        for share in self.train_shares(batch_size, epoch):
            yield share.batch

    def train_shares(
        self, batch_size: int, epoch: int = 0, *, rank: int = 0, world_size: int = 1, start: int = 0
    ) -> Iterator[Share]:
        check_shares(batch_size, epoch, rank, world_size, start)
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._ends))
        for first in range(start, len(order), batch_size):
            end = min(first + batch_size, len(order))
            low, high = bounds(end - first, rank, world_size)
            ends_B = self._ends[order[first + low : first + high]]
            targets = _Bags(self._train.items[ends_B], np.ones(len(ends_B), np.int64))
            batch = self._batch(self._train.users[ends_B], targets, ends_B, seen=False)
            yield Share(batch, first + low, end - first, end)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        for first in range(0, len(self._queries), batch_size):
            users_B = self._queries[first : first + batch_size]
            yield self._batch(users_B, self._held.bags(users_B), self._train.ends[users_B], seen=True)

    def rows(self, batch_size: int, keys: Sequence[str] = ()) -> Iterator[tuple[Batch, pa.Table]]:
        """Yield one sample per user, in the order of the users; see the class for `labelled`.

        Labelled samples are those of users with a known item.
        """
        readable_users = readable(self._user_values)
        users_U = np.flatnonzero(self._train.counts) if self._labelled else np.arange(len(self._user_values))
        for first in range(0, len(users_U), batch_size):
            users_B = users_U[first : first + batch_size]
            ends_B = self._train.ends[users_B]
            if self._labelled:
                ends_B = ends_B - 1
                targets = _Bags(self._train.items[ends_B], np.ones(len(users_B), np.int64))
            else:
                targets = _Bags(np.zeros(0, np.int32), np.zeros(len(users_B), np.int64))
            batch = self._batch(users_B, targets, ends_B, seen=True)
            yield batch, pa.table({self._user_key: readable_users.take(pa.array(users_B))} if keys else {})

    def row_count(self) -> RowCount:
        return self._count

    def catalog(self, item: str, others: Sequence[str] = ()) -> Catalog:
        if item != "item" or others:
            raise ConfigError(
                f"task: got items with features {[item, *others]}; expected ['item'] with data.kind = 'interactions'. "
                "Use data.kind = 'files' for items with further features."
            )
        count = len(self._items.values)
        ids = torch.arange(1, count + 1)
        counts = np.bincount(self._train.items, minlength=count + 1)[1 : count + 1]
        features = KeyedJaggedTensor(["item"], ids, lengths=torch.ones(count, dtype=torch.int64), stride=count)
        return Catalog(ids, readable(self._items.values), torch.from_numpy(counts.astype(np.int64)), features)

    def vocabularies(self) -> Mapping[str, pa.Array]:
        return {"user": self._users.values, "item": self._items.values}

    def histories(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all training interactions, ordered by user and time: number of the user and row of the item [n]."""
        return torch.from_numpy(self._train.users), torch.from_numpy(self._train.items.astype(np.int64))

    def training_times(self) -> npt.NDArray[Any] | None:
        """Return the times of `histories` [n]; None without a column of times."""
        return self._times

    def _batch(self, users_B: Ints, targets: _Bags, ends_B: Ints, *, seen: bool) -> Batch:
        """Return samples with the items before `ends_B`, places in the training interactions, as histories."""
        size = len(users_B)
        before_B = ends_B - self._train.starts[users_B]
        lengths_B = np.minimum(before_B, self._max_length)
        bags = [
            _known(self._row_of_user[users_B]),
            targets,
            _ranges(self._train.items, ends_B - lengths_B, lengths_B),
            _ranges(self._train.items, ends_B - before_B, before_B if seen else np.zeros(size, np.int64)),
        ]
        return Batch(
            torch.zeros(size, 0),
            KeyedJaggedTensor(
                list(KEYS),
                torch.from_numpy(np.concatenate([bag.values for bag in bags]).astype(np.int64)),
                lengths=torch.from_numpy(np.concatenate([bag.lengths for bag in bags])),
                stride=size,
            ),
            torch.ones(size),
        )


@dataclass(frozen=True)
class _Bags:
    """Ids of consecutive samples."""

    values: npt.NDArray[Any]
    lengths: Ints


def _known(row_B: Ints) -> _Bags:
    """Return bags of one row, or of none for row 0."""
    return _Bags(row_B[row_B > 0], (row_B > 0).astype(np.int64))


class _ByUser:
    """Interactions ordered by user and time: numbers of users, rows of items, and the range of each user."""

    def __init__(self, users_n: Ints, items_n: npt.NDArray[np.int32], users: int) -> None:
        self.users, self.items = users_n, items_n
        self.counts = np.bincount(users_n, minlength=users).astype(np.int64)
        self.ends = np.cumsum(self.counts)
        self.starts = self.ends - self.counts

    def bags(self, users_B: Ints) -> _Bags:
        return _ranges(self.items, self.starts[users_B], self.counts[users_B])


def _ranges(values: npt.NDArray[Any], starts_B: Ints, lengths_B: Ints) -> _Bags:
    """Return values[start : start + length] of each sample."""
    ends_B = np.cumsum(lengths_B)
    total = int(ends_B[-1]) if len(ends_B) else 0
    places = np.arange(total) + np.repeat(starts_B - (ends_B - lengths_B), lengths_B)
    return _Bags(values[places], lengths_B)
