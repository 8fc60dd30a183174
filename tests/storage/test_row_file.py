"""Tables in files: the same bits as in memory, nothing left behind, and errors that name the folder."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.storage.cached_tables import batch, ebc, everything, step
from tilerec import (
    CacheAlgorithm,
    ConfigError,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    apply_optimizer_in_backward,
    cache_tables,
    uncache_tables,
)
from tilerec.checkpoint.row_snapshot import row_bytes
from tilerec.errors import FileError
from tilerec.modules.initial_values import INIT_BLOCK
from tilerec.modules.table_resize import resize_table
from tilerec.optim.fused import CachedStateView
from tilerec.spec.optimizer import LAMB, SGD, Adagrad, Adam, OptimizerSpec, PartialRowWiseLAMB, RowWiseAdagrad
from tilerec.storage import file_rows, row_file
from tilerec.storage.file_rows import select_rows
from tilerec.storage.row_file import (
    RowField,
    RowFile,
    file_of,
    record_of,
    release,
    row_blocks,
    tensor_in_file,
    tensors_in_file,
)

RULES: list[OptimizerSpec] = [
    SGD(0.1), SGD(0.1, momentum=0.9), Adagrad(0.1, initial_accumulator_value=0.5), RowWiseAdagrad(0.1), Adam(0.1),
    LAMB(0.1), PartialRowWiseLAMB(0.1),
]  # fmt: skip


def assert_same(first: nn.Module, second: nn.Module) -> None:
    for a, b in zip(everything(first), everything(second), strict=True):
        assert torch.equal(a, b)


def in_files(module: nn.Module) -> bool:
    return all(file_of(leaf) is not None for leaf in module.parameters())


@pytest.mark.parametrize("algorithm", CacheAlgorithm)
@pytest.mark.parametrize("spec", RULES, ids=lambda spec: type(spec).__name__)
def test_training_is_the_same_bits_as_in_memory(tmp_path: Path, spec: OptimizerSpec, algorithm: CacheAlgorithm) -> None:
    plain, other = ebc(spec), ebc(spec)
    cache_tables(other, 0.1, algorithm, folder=tmp_path)
    first, second = random.Random(1), random.Random(1)
    for turn in range(12):
        if turn % 4 == 1:  # rows are loaded ahead of their lookup
            other.prefetch(batch(random.Random(turn)))
        assert torch.equal(step(plain, batch(first)), step(other, batch(second)))
        if turn == 6:
            assert torch.equal(plain.state_dict()["embedding_bags.a.weight"], other.embedding_bags["a"].weight)
    stats = other.cache_stats()
    assert in_files(other)
    assert sum(own.evictions for own in stats.values()) > 0
    assert_same(plain, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_every_data_type_is_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    spec = Adam(0.1, stochastic_rounding=dtype in (torch.float16, torch.bfloat16))
    plain, other = ebc(spec, dtype=dtype), ebc(spec, dtype=dtype)
    cache_tables(other, 0.1, folder=tmp_path)
    first, second = random.Random(1), random.Random(1)
    for _ in range(5):
        assert torch.equal(step(plain, batch(first)), step(other, batch(second)))
    for a, b in zip(everything(plain), everything(other), strict=True):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def on_meta(init_fn: Callable[[Tensor], object] | None = None, rows: int = 300) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(rows, 8, "a", feature_names=["f"], init_fn=init_fn)]
    torch.manual_seed(5)
    return EmbeddingBagCollection(tables, device=torch.device("meta"))


@pytest.mark.parametrize("init_fn", [None, nn.init.normal_])
@pytest.mark.parametrize("attached", ["before", "after"])
def test_a_table_on_meta_gets_its_initial_values_in_its_file(
    tmp_path: Path, init_fn: Callable[[Tensor], object] | None, attached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_file, "BLOCK_BYTES", 1000)
    plain, other = on_meta(init_fn), on_meta(init_fn)
    spec = Adagrad(0.1, initial_accumulator_value=0.25)
    for module in (plain, other):
        if attached == "before":
            apply_optimizer_in_backward(spec, module.parameters())
        if module is plain:
            module.to_empty(device="cpu")
        else:
            cache_tables(module, 0.1, folder=tmp_path)
        if attached == "after":
            apply_optimizer_in_backward(spec, module.parameters())
    assert in_files(other)
    assert_same(plain, other)


def test_initial_values_are_written_in_blocks_of_the_init_function(tmp_path: Path) -> None:
    seen: list[int] = []

    def ones(block: Tensor) -> None:
        seen.append(block.shape[0])
        block.fill_(len(seen))

    module = cache_tables(on_meta(ones, INIT_BLOCK + 5), 0.001, folder=tmp_path)
    assert seen == [INIT_BLOCK, 5]
    assert module.embedding_bags["a"].weight[-6:, 0].tolist() == [1, 2, 2, 2, 2, 2]


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    module = cache_tables(ebc(Adam(0.1)), 0.1, folder=tmp_path)
    rng = random.Random(1)
    files = list(row_file._FILES.values())
    assert len(files) == 3  # one per table, with its two slots
    step(module, batch(rng))
    assert os.listdir(tmp_path) == []
    descriptors = [file.descriptor for file in files]
    del files
    uncache_tables(module)
    gc.collect()
    assert not row_file._FILES
    for number in descriptors:
        with pytest.raises(OSError):
            os.fstat(number)


def test_uncached_tables_are_in_memory_again(tmp_path: Path) -> None:
    plain, other = ebc(Adam(0.1)), ebc(Adam(0.1))
    cache_tables(other, 0.1, folder=tmp_path)
    first, second = random.Random(1), random.Random(1)
    step(plain, batch(first)), step(other, batch(second))
    uncache_tables(other)
    assert not any(file_of(leaf) for leaf in other.parameters())
    assert torch.equal(step(plain, batch(first)), step(other, batch(second)))
    assert_same(plain, other)


def test_a_new_cache_moves_rows_between_files_and_memory(tmp_path: Path) -> None:
    plain, other = ebc(Adam(0.1)), ebc(Adam(0.1))
    first, second = random.Random(1), random.Random(1)
    for folder in (tmp_path, None, tmp_path):
        cache_tables(other, 0.1, folder=folder)
        assert in_files(other) == (folder is not None)
        assert torch.equal(step(plain, batch(first)), step(other, batch(second)))
    assert_same(plain, other)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_files_of_its_own(tmp_path: Path, how: str) -> None:
    other = cache_tables(ebc(Adam(0.1)), 0.1, folder=tmp_path)
    rng = random.Random(1)
    step(other, batch(rng))
    twin = copy.deepcopy(other) if how == "deepcopy" else pickle.loads(pickle.dumps(other))
    assert in_files(twin)
    assert_same(other, twin)
    before = [tensor.clone() for tensor in everything(other)]
    step(twin, batch(rng))
    for a, b in zip(before, everything(other), strict=True):
        assert torch.equal(a, b)


def test_state_is_loaded_into_files(tmp_path: Path) -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.1, folder=tmp_path)
    rng = random.Random(1)
    step(plain, batch(rng))
    step(other, batch(rng))
    for assign in (False, True):
        other.load_state_dict(plain.state_dict(), assign=assign)
        assert in_files(other)
        assert torch.equal(other.embedding_bags["a"].weight, plain.embedding_bags["a"].weight)


def test_another_precision_stays_in_files(tmp_path: Path) -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.1, folder=tmp_path)
    plain.to(torch.float64), other.to(torch.float64)
    first, second = random.Random(1), random.Random(1)
    assert torch.equal(step(plain, batch(first)), step(other, batch(second)))
    assert in_files(other)
    assert_same(plain, other)


def test_files_cannot_be_shared_by_processes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Table 'a': its rows are in files, which processes cannot share"):
        cache_tables(ebc(SGD(0.1)), 0.1, folder=tmp_path).share_memory()


def test_a_table_in_files_is_not_resized(tmp_path: Path) -> None:
    none = torch.empty(0, dtype=torch.int64)
    other = cache_tables(ebc(SGD(0.1)), 0.1, folder=tmp_path)
    with pytest.raises(
        ConfigError, match=f"Table 'a': its rows are in files of {tmp_path}, where a table cannot be res"
    ):
        resize_table(other, "a", 400, none, none)


def test_values_written_through_the_name_are_read(tmp_path: Path) -> None:
    plain, other = ebc(SGD(0.1)), cache_tables(ebc(SGD(0.1)), 0.1, folder=tmp_path)
    first, second = random.Random(1), random.Random(1)
    for _ in range(3):
        assert torch.equal(step(plain, batch(first)), step(other, batch(second)))
        for module in (plain, other):
            with torch.no_grad():
                module.embedding_bags["a"].weight[:50] *= 2
    assert_same(plain, other)


# ---------------------------------------------------------------------------------------------------------- records


def one_table(spec: OptimizerSpec | None, folder: Path, rows: int = 300) -> EmbeddingBagCollection:
    module = on_meta(rows=rows)
    if spec is not None:
        apply_optimizer_in_backward(spec, module.parameters())
    cache_tables(module, 0.1, folder=folder)
    return module


def files_of(module: EmbeddingBagCollection) -> list[RowFile | None]:
    return [file_of(tensor) for tensor in module.embedding_bags["a"].rows.host()]


@pytest.mark.parametrize("spec", RULES, ids=lambda spec: type(spec).__name__)
def test_a_row_that_misses_is_one_read_and_one_write(
    tmp_path: Path, spec: OptimizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    made = {name: getattr(torch.ops.tilerec, name) for name in ("read_rows_", "write_rows_")}

    class Counted:
        def __getattr__(self, name: str) -> Callable[..., None]:
            calls.append(name)
            return made[name]

    monkeypatch.setattr(file_rows, "OPS", Counted())
    module = one_table(spec, tmp_path)
    for first in (0, 150):
        ids = torch.arange(first, first + 150)
        module(KeyedJaggedTensor.from_lengths_sync(["f"], ids, torch.ones_like(ids))).values().sum().backward()
    assert len(set(files_of(module))) == 1
    assert calls.count("read_rows_") == 2
    assert calls.count("write_rows_") == 1
    module.embedding_bags["a"].settle()
    assert calls.count("write_rows_") == 2


def test_fields_lie_by_falling_size_of_their_items_and_records_are_aligned() -> None:
    row, state, number = RowField((3,), torch.bfloat16), RowField((3,), torch.float32), RowField((), torch.float32)
    assert record_of([row, number]) == (12, [4, 0])
    assert record_of([row, state, number]) == (24, [16, 0, 12])
    assert record_of([RowField((5,), torch.float8_e4m3fn)]) == (5, [0])


def test_tensors_of_a_file_share_records_and_no_version(tmp_path: Path) -> None:
    fields = [RowField((3,), torch.bfloat16), RowField((), torch.float32), RowField((2, 2), torch.float64)]
    tensors = tensors_in_file(str(tmp_path), 10, fields, "t")
    for k, tensor in enumerate(tensors):
        assert tensor.shape == (10, *fields[k].shape)
        tensor.fill_(k + 1)
        assert tensor.stride(0) * tensor.itemsize == 48
    assert [tensor.unique().tolist() for tensor in tensors] == [[1], [2], [3]]
    assert [tensor._version for tensor in tensors] == [1, 1, 1]
    assert len({file_of(tensor) for tensor in tensors}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_rows_of_a_field_or_of_a_part_of_it_are_read_at_their_places(tmp_path: Path, dtype: torch.dtype) -> None:
    rows, sums = tensors_in_file(str(tmp_path), 40, [RowField((6,), dtype), RowField((), torch.float32)], "t")
    rows.copy_(torch.arange(240).view(40, 6))
    sums.copy_(torch.arange(40))
    wanted = torch.tensor([7, 0, 19, 8])
    for tensor in (rows, sums, rows[20:], sums[20:], rows[:, 2:5], rows[3:4], row_bytes(rows), row_bytes(sums)):
        found = select_rows(tensor, wanted if len(tensor) > 1 else torch.tensor([0, 0]))
        expected = tensor.view(torch.uint8) if dtype == torch.float8_e4m3fn and tensor.dtype == dtype else tensor
        expected = expected[wanted if len(tensor) > 1 else torch.tensor([0, 0])]
        assert torch.equal(found.view(expected.dtype), expected)


def test_an_optimizer_that_is_attached_anew_has_fresh_state(tmp_path: Path) -> None:
    spec = Adagrad(0.1, initial_accumulator_value=0.5)
    module = one_table(spec, tmp_path)
    rows = module.embedding_bags["a"].rows
    first = files_of(module)[0]
    for own, empty in ((spec, 0.5), (Adam(0.1), 0.0), (Adam(0.1), 0.0)):
        apply_optimizer_in_backward(own, module.parameters(), replace=True)
        assert len(set(files_of(module))) == 1
        assert all(torch.equal(slot, torch.full_like(slot, empty)) for slot in rows.slots)
        weight = module.embedding_bags["a"].weight.detach().clone()
        ids = torch.arange(300)
        module(KeyedJaggedTensor.from_lengths_sync(["f"], ids, torch.ones_like(ids))).values().sum().backward()
        assert not torch.equal(module.embedding_bags["a"].weight, weight)
        assert all((slot != empty).all() for slot in rows.slots)
    assert files_of(module)[0] is not first  # Adam's records are longer
    assert torch.equal(rows.slots[0], torch.full_like(rows.slots[0], 0.1))


def test_the_space_of_state_is_allocated_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    made = os.posix_fallocate

    def counted(number: int, first: int, size: int) -> None:
        sizes.append(size)
        made(number, first, size)

    monkeypatch.setattr(os, "posix_fallocate", counted)
    one_table(Adam(0.1), tmp_path)
    assert sizes == [300 * 3 * 8 * 4]


def test_state_that_begins_as_zeros_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    blocks = row_file.row_blocks

    def counted(tensor: Tensor) -> Iterator[Tensor]:
        filled.append(tensor.dim())
        return blocks(tensor)

    monkeypatch.setattr(row_file, "row_blocks", counted)
    one_table(Adam(0.1), tmp_path)
    assert filled == []
    one_table(RowWiseAdagrad(0.1, initial_accumulator_value=0.5), tmp_path)
    assert filled == [1]


def test_state_that_is_assigned_joins_its_rows(tmp_path: Path) -> None:
    module = one_table(Adam(0.1), tmp_path)
    view = CachedStateView(module.embedding_bags["a"].rows)
    values = torch.arange(2400.0).view(300, 8)
    view["exp_avg"] = values
    assert len(set(files_of(module))) == 1
    assert torch.equal(view["exp_avg"], values)
    assert not view["exp_avg_sq"].any()


def test_the_count_of_updates_stays_in_memory(tmp_path: Path) -> None:
    rows = one_table(Adam(0.1), tmp_path).embedding_bags["a"].rows
    assert file_of(rows.leaf) is not None
    assert file_of(rows.state["step"]) is None


# ---------------------------------------------------------------------------------------------------------- tensors


def test_a_released_tensor_keeps_its_values(tmp_path: Path) -> None:
    tensor = tensor_in_file(str(tmp_path), (3000, 7), torch.float32, "t")
    assert not tensor.any()
    for number, block in enumerate(row_blocks(tensor)):
        block.fill_(number + 1)
    part = tensor[1000:1010, 2:5]
    part.fill_(9)
    release(part)
    release(tensor)
    assert tensor[1000:1010].tolist() == [[1, 1, 9, 9, 9, 1, 1]] * 10
    assert tensor[2999, 0] == 1


def test_the_memory_of_a_file_ends_with_its_last_tensor(tmp_path: Path) -> None:
    tensor = tensor_in_file(str(tmp_path), (10, 3), torch.float32, "t")
    file = file_of(tensor)
    assert isinstance(file, RowFile)
    descriptor = file.descriptor
    part = tensor[2:]
    assert file_of(part) is file
    assert file_of(torch.empty(3)) is None
    del tensor, file
    assert os.fstat(descriptor).st_nlink == 0
    del part
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_a_tensor_without_elements_needs_no_file(tmp_path: Path) -> None:
    assert file_of(tensor_in_file(str(tmp_path / "none"), (0, 8), torch.float32, "t")) is None


# ----------------------------------------------------------------------------------------------------------- errors


def test_a_folder_that_is_missing_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    module = ebc(Adam(0.1))
    before = [tensor.clone() for tensor in everything(module)]
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(
            FileError, match=f"Table 'a': got 'no such folder' .*in folder {folder}.*Free space, choose"
        ):
            cache_tables(module, 0.1, folder=folder)
    assert not any(file_of(leaf) for leaf in module.parameters())
    for a, b in zip(before, everything(module), strict=True):
        assert torch.equal(a, b)


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(FileError, match=r"Table 'a': got .* in folder /proc/self"):
        cache_tables(ebc(None), 0.1, folder="/proc/self")


def test_a_disk_without_room_is_refused_before_training(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    rows = free // 32 + (1 << 31)
    with pytest.raises(FileError, match=r"Table 'a': got '.*' for [\d,]+ bytes of rows in folder .* bytes free\)"):
        cache_tables(on_meta(rows=rows), 1e-9, folder=tmp_path)
    now = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert now > free - (1 << 31)


_LIMITED = """
import random, resource, signal, sys
from tests.storage.cached_tables import batch, ebc, step
from tilerec import cache_tables
from tilerec.checkpoint.row_snapshot import row_bytes
from tilerec.errors import FileError
from tilerec.spec.optimizer import Adam

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
module = cache_tables(ebc(Adam(0.1)), 0.1, folder=sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
rng = random.Random(1)
try:
    for _ in range(20):
        step(module, batch(rng))
except FileError as error:
    print(error)
"""


def test_a_disk_that_fills_up_later_is_an_error_by_name(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _LIMITED, tmp_path], capture_output=True, text=True, check=True)
    assert "Table '" in done.stdout, done.stderr
    assert f"bytes of rows in folder {tmp_path}" in done.stdout
    assert "a job continues from its checkpoint" in done.stdout


_KILLED = """
import os, random, signal, sys
from tests.storage.cached_tables import batch, ebc, step
from tilerec import cache_tables
from tilerec.spec.optimizer import Adam

module = cache_tables(ebc(Adam(0.1)), 0.1, folder=sys.argv[1])
step(module, batch(random.Random(1)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_job_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert os.listdir(tmp_path) == []


_MEMORY = """
import re, sys
import torch
from tilerec import (
    EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, apply_optimizer_in_backward, cache_tables,
)
from tilerec.checkpoint import load, save
from tilerec.optim.fused import FusedOptimizer
from tilerec.spec.optimizer import RowWiseAdagrad

def held():
    text = open("/proc/self/status").read()
    return {name: int(re.search(name + r":\\s+(\\d+)", text)[1]) >> 10 for name in ("RssAnon", "RssFile", "VmHWM")}

def module(rows):
    tables = [EmbeddingBagConfig(rows, 128, "a", feature_names=["f"])]
    found = EmbeddingBagCollection(tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad(0.1), found.parameters())
    return cache_tables(found, 1 / 64, folder=sys.argv[1])

def steps(module, rows):
    for _ in range(4):
        ids, lengths = torch.randint(0, rows, (4096,)), torch.ones(4096, dtype=torch.int64)
        module(KeyedJaggedTensor.from_lengths_sync(["f"], ids, lengths)).values().sum().backward()

small = module(10000)
steps(small, 10000)
save(sys.argv[1] + "/small", {"model": small, "state": FusedOptimizer(small)})
load(sys.argv[1] + "/small", {"model": small, "state": FusedOptimizer(small)})
before = held()
large = module(1 << 20)
steps(large, 1 << 20)
after = held()
save(sys.argv[1] + "/large", {"model": large, "state": FusedOptimizer(large)})
load(sys.argv[1] + "/large", {"model": large, "state": FusedOptimizer(large)})
steps(large, 1 << 20)
end = held()
print(*(now[name] - before[name] for now in (after, end) for name in ("RssAnon", "RssFile", "VmHWM")))
"""


def test_resident_memory_is_the_cache_and_a_constant(tmp_path: Path) -> None:
    """A table of 512 MiB, a cache of 8 MiB: neither making, training, saving nor loading it holds the table."""
    done = subprocess.run([sys.executable, "-c", _MEMORY, tmp_path], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    growth = [int(word) for word in done.stdout.split()]
    assert len(growth) == 6
    assert max(growth) < 128, growth  # MiB; VmHWM is the largest so far


def test_an_evaluation_reads_rows_and_writes_none(tmp_path: Path) -> None:
    plain, other = ebc(None), ebc(None)
    cache_tables(other, 0.1, folder=tmp_path)
    first, second = random.Random(1), random.Random(1)
    with torch.no_grad():
        for _ in range(5):
            kjt: KeyedJaggedTensor = batch(first)
            assert torch.equal(plain(kjt).values(), other(batch(second)).values())
    assert sum(own.write_backs for own in other.cache_stats().values()) == 0
