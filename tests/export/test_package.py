"""A package: the model's bits in Python and C++ for any batch size, and clear errors for everything else."""

from __future__ import annotations

import gc
import json
import os
import re
import runpy
import shutil
import socket
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.export.export_models import EveryBatch, EveryKind, every_batch, every_kind, kjt
from tests.export.triton_stub import StubTensor, request, triton_utils
from tilerec.errors import ConfigError, FileError, InputError
from tilerec.export import Package, cpp_flags, export, load
from tilerec.export.arguments import flat_tensors
from tilerec.export.array_package import load_arrays
from tilerec.export.signature import TensorSpec
from tilerec.export.torch_library import ops_path
from tilerec.export.triton_repository import write_triton
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

ROOT = Path(__file__).parents[2]
TORCH_213 = torch.torch_version.TorchVersion(torch.__version__) >= (2, 13)
SAMPLES = (0, 1, 2, 64)
MANIFEST = "model/extra/tilerec.json"
BAD_ID = (  # the compiler chooses the order of lookups
    r"Table '(user|item|seen)': got id \d+ of feature '(user|item)' \(position \d+ of the batch's values\); expected "
    r"ids in \[0, 24\)\. Remap the ids, enlarge num_embeddings, or build the collection with on_bad_id='clamp'\."
)


LENGTHS_BEYOND = "offsets must not fall and must lie in|API call failed|the lengths sum to"


@pytest.fixture(scope="module")
def model() -> EveryKind:
    return every_kind()


@pytest.fixture(scope="module")
def path(model: EveryKind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled once for all tests of this file: that takes seconds."""
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    export(model, every_batch(3).args(), path)
    return path


@pytest.fixture(scope="module")
def package(path: Path) -> Package:
    return load(path)


def wanted(model: EveryKind, batch: EveryBatch) -> dict[str, Tensor]:
    with torch.no_grad():
        return model(*batch.args())


def with_lengths(batch: KeyedJaggedTensor, place: int, more: int) -> KeyedJaggedTensor:
    """Return a batch with one other length, as int64 if int32 cannot hold it."""
    lengths = batch.lengths().long()
    lengths[place] += more
    narrow = lengths.int()
    return KeyedJaggedTensor(
        batch.keys(), batch.values(), lengths=narrow if torch.equal(narrow.long(), lengths) else lengths
    )


def with_ids(batch: KeyedJaggedTensor, ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(batch.keys(), ids, lengths=batch.lengths())


# ------------------------------------------------------------------------------------------------------------ in Python


@pytest.mark.parametrize("samples", SAMPLES)
def test_a_package_returns_the_model_s_bits(model: EveryKind, package: Package, samples: int) -> None:
    batch = every_batch(samples, samples)
    found = package(*batch.args())
    for name, value in wanted(model, batch).items():
        assert torch.equal(found[name], value)


def test_calls_of_several_threads_wait_for_each_other(model: EveryKind, package: Package) -> None:
    batches = [every_batch(samples, samples) for samples in (1, 5, 40)]
    want = [wanted(model, batch)["logits"] for batch in batches]

    def call() -> bool:
        return all(
            torch.equal(package(*batch.args())["logits"], logits)
            for _ in range(10)
            for batch, logits in zip(batches, want, strict=True)
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(done.result(60) for done in [threads.submit(call) for _ in range(4)])


def test_a_package_that_is_no_longer_used_keeps_no_memory(path: Path, tmp_path: Path) -> None:
    """A server takes over many versions; the weights of those before are freed."""
    copy = tmp_path / "copy.pt2"
    shutil.copy(path, copy)
    own = load(copy)
    own(*every_batch(2).args())
    maps = Path("/proc/self/maps")
    assert str(copy) in maps.read_text()
    del own
    gc.collect()
    assert str(copy) not in maps.read_text()


def test_arguments_pass_by_name_and_keys_in_any_order(model: EveryKind, package: Package) -> None:
    batch = every_batch(5, 5)
    reordered = batch.pooled.permute([1, 0])
    found = package(batch.dense, managed=batch.managed, pooled=reordered)
    assert torch.equal(found["logits"], wanted(model, batch)["logits"])


def test_bags_without_ids_and_a_batch_without_any(model: EveryKind, package: Package) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    lengths = torch.zeros(8, dtype=torch.int32)
    batch = EveryBatch(
        torch.ones(4, 3),
        KeyedJaggedTensor.from_lengths_sync(["user", "item"], none, lengths),
        KeyedJaggedTensor.from_lengths_sync(["raw"], none, lengths[:4]),
    )
    assert torch.equal(package(*batch.args())["seen"], wanted(model, batch)["seen"])


def test_a_row_that_is_written_is_served_by_the_next_call(path: Path) -> None:
    own = load(path)
    batch = every_batch(2, 2)
    before = own(*batch.args())["logits"]
    (table,) = (entry for entry in own.manifest.tables if entry.name == "pooled.embedding_bags.user")
    own.weights[table.weight].add_(1)
    assert not torch.equal(own(*batch.args())["logits"], before)
    assert torch.equal(load(path)(*batch.args())["logits"], before)


def test_the_weights_are_stored_once(package: Package, path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        stored = archive.getinfo("model/data/weights/tilerec.bin").file_size
    assert stored <= sum(weight.nbytes for weight in package.weights.values()) + 64 * len(package.weights)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda b: (b.dense.to("meta"), b.pooled, b.managed), "got a tensor on meta; expected a dense tensor on"),
        (lambda b: (b.dense.double(), b.pooled, b.managed), "Input 'dense': got float64; expected float32"),
        (lambda b: (b.dense[:1], b.pooled, b.managed), r"Input 'pooled.lengths': got shape \[2, 3\]; expected \[2, "),
        (lambda b: (b.dense, b.pooled.values(), b.managed), "Input 'pooled': got a Tensor; expected a Keyed"),
        (lambda b: (b.dense, b.managed, b.managed), r"Input 'pooled': got no feature \['user', 'item'\]"),
        (
            lambda b: (b.dense, kjt(("user", "item", "more"), 3, torch.Generator()), b.managed),
            r"Input 'pooled': got the unknown features \['more'\]",
        ),
        (
            lambda b: (b.dense, with_ids(b.pooled, b.pooled.values().int()), b.managed),
            "Input 'pooled.values': got int32; expected int64",
        ),
        (lambda b: (b.dense, b.pooled), r"got the arguments \(…, …\); expected \['dense', 'pooled', 'managed'\]"),
        (
            lambda b: (b.dense, with_ids(b.pooled, b.pooled.values() + 99), b.managed),
            # torch < 2.13 passes on only that a call of an op has failed
            BAD_ID if TORCH_213 else f"{BAD_ID}|API call failed",
        ),
        (lambda b: (b.dense.numpy(), b.pooled, b.managed), r"got a ndarray; .* torch\.as_tensor\(\.\.\., dtype"),
        (lambda b: (b.dense.to_sparse(), b.pooled, b.managed), r"got a tensor of the layout torch.sparse_coo"),
        (lambda b: (b.dense.tolist(), b.pooled, b.managed), "Pass tensors and jagged batches in these containers"),
        (lambda b: (b.dense, with_lengths(b.pooled, 0, 2**32), b.managed), "got int64 lengths from .* to 429496729"),
        (lambda b: (b.dense, with_lengths(b.pooled, 0, -(2**32)), b.managed), "got int64 lengths from -429496729"),
        (lambda b: (b.dense, with_lengths(b.pooled, 0, 2**31 - 1), b.managed), LENGTHS_BEYOND),
        (lambda b: (b.dense, with_lengths(b.pooled, 0, 9), b.managed), LENGTHS_BEYOND),
        (lambda b: (b.dense, with_lengths(b.pooled, 0, -9), b.managed), LENGTHS_BEYOND),
        (lambda b: (b.dense.expand(1 << 40, 3, 3)[:, 0], b.pooled, b.managed), "with {'batch': 1099511627776}"),
    ],
)  # fmt: skip
def test_a_wrong_batch_is_named(package: Package, change: Callable[[EveryBatch], Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        package(*change(every_batch(3, 3)))
    assert package(*every_batch(1).args())["logits"].shape[0] == 1


def test_weights_that_the_model_does_not_read_are_refused(package: Package) -> None:
    batch = every_batch(3)
    ids = batch.pooled
    weighted = KeyedJaggedTensor(ids.keys(), ids.values(), torch.ones(ids.values().shape), lengths=ids.lengths())
    with pytest.raises(InputError, match="Input 'pooled': got a batch with weights; expected none"):
        package(batch.dense, weighted, batch.managed)


def test_tensors_of_another_number_are_refused(package: Package) -> None:
    with pytest.raises(InputError, match=r"got 1 tensors; expected \d+: \['dense', 'pooled.values', "):
        package.run([torch.zeros(1, 3)])


def test_a_batch_of_many_empty_samples_is_a_batch(package: Package) -> None:
    none, samples = torch.zeros(0, dtype=torch.int64), 1 << 17
    empty = torch.zeros(2 * samples, dtype=torch.int32)
    pooled = KeyedJaggedTensor(["user", "item"], none, lengths=empty)
    managed = KeyedJaggedTensor(["raw"], none, lengths=empty[:samples])
    assert package(torch.zeros(samples, 3), pooled, managed)["logits"].shape[0] == samples


# ---------------------------------------------------------------------------------------------------------------- files


def repacked(source: Path, target: Path, edit: Callable[[dict[str, Any]], None], text: bytes = b"") -> Path:
    """Write a package with another manifest, or with a text instead of it."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for i, part in enumerate(old.infolist()):
            data = old.read(part)
            if part.filename == MANIFEST:
                manifest = json.loads(data)
                edit(manifest)
                data = text or json.dumps(manifest).encode()
            with new.open(part, "w", force_zip64=i == 0) as out:
                out.write(data)
    return target


def _table(manifest: dict[str, Any], **values: Any) -> None:
    manifest["tables"][0] |= values


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda m: m.update(abi=99), "got a package for version 99 of tilerec's ops; expected 1"),
        (lambda m: m.update(torch="1.0"), "got a package of torch 1.0; expected torch 2"),
        (lambda m: m.update(cpu="SVE"), "got a package for SVE; expected code for "),
        (lambda m: m.update(version=9), "version: got 9; expected 1"),
        (lambda m: m.pop("outputs"), 'got an object without "outputs"'),
        (lambda m: _table(m, rows=5), r"table '.*' has the shape \[24, 4\]; expected \[5, 4\]"),
        (lambda m: _table(m, weight="x"), "table '.*' has no weight; expected"),
        (lambda m: m["weights"][-1].update(start=1 << 40), "begins at byte 1099511627776; expected a place in"),
        (lambda m: m["weights"][0].update(shape=[1 << 40, 1 << 40]), "begins at byte 0; expected a place in"),
        (lambda m: m["weights"][0].update(shape=[1 << 62, 4, 0]), "begins at byte 0; expected a place in"),
        (lambda m: m["weights"][0].update(dtype="quint8"), r'weights\[0\]\.dtype: got "quint8"; expected one of'),
        (lambda m: m["weights"][0].update(dtype="load"), r'weights\[0\]\.dtype: got "load"; expected one of'),
        (lambda m: m["weights"][0].update(sha256="0" * 64), "weight '.*' has other bytes than the manifest states"),
        (lambda m: m.update(base="0" * 64), "its manifest describes another model than its compiled part"),
        (lambda m: m["signature"]["inputs"][0]["tensors"][0].update(dtype="int8"), "describes another model"),
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_fit_is_refused(
    path: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        load(repacked(path, tmp_path / "other.pt2", edit))


def test_without_a_compiler_nothing_is_traced_or_written(
    model: EveryKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilerec.export.exporting.cpp_compiler", lambda: None)
    monkeypatch.setattr("tilerec.export.exporting.traced", lambda *_, **__: pytest.fail("traced"))
    with pytest.raises(ConfigError, match=r"export: got no C\+\+ compiler; expected g\+\+ or .* Install g\+\+\."):
        export(model, every_batch(3).args(), tmp_path / "model.pt2")
    assert not any(tmp_path.iterdir())


def test_files_that_are_no_package_are_refused(path: Path, tmp_path: Path) -> None:
    whole = path.read_bytes()
    torn, text, other = tmp_path / "torn.pt2", tmp_path / "text.pt2", tmp_path / "other.pt2"
    for size in (len(whole) // 2, len(whole) - 30, 5000):
        torn.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="got a part of a package, or a damaged one"):
            load(torn)
    text.write_text("hello")
    with pytest.raises(ConfigError, match="got no archive; expected a file of tilerec"):
        load(text)
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(ConfigError, match=r"got an archive without model/extra/tilerec\.json"):
        load(other)
    with pytest.raises(FileError, match="got 'No such file or directory'; expected a readable file"):
        load(tmp_path / "missing.pt2")


@pytest.mark.parametrize("path", [3, True, None, b"model.pt2", ["model.pt2"], "model\0.pt2"])
def test_what_is_no_path_is_refused_and_no_descriptor_closed(path: Any) -> None:
    with pytest.raises(ConfigError, match="as its path; expected a str or a Path"):
        load(path)
    os.fstat(1)


def test_a_pipe_is_refused_without_a_wait_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="got 'not a regular file'; expected a readable file"):
        load(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 1000 + b"]" * 1000, "nested more than 64 deep"),
        (b"\xff{}", "got byte 0xff at 0; expected UTF-8"),
        (b'{"version": 1, "version": 1}', 'got "version" more than once'),
        (b"[]", r"got \[\]; expected an object with"),
    ],
)
def test_a_manifest_that_is_no_document_is_refused(path: Path, tmp_path: Path, text: bytes, reason: str) -> None:
    other = repacked(path, tmp_path / "other.pt2", lambda _: None, text)
    with pytest.raises(ConfigError, match=reason):
        load(other)


def test_a_manifest_that_expands_without_bound_is_not_read(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt2"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for i, part in enumerate(old.infolist()):
            data = old.read(part)
            part.compress_type = zipfile.ZIP_DEFLATED if part.filename == MANIFEST else zipfile.ZIP_STORED
            with new.open(part, "w", force_zip64=i == 0) as out:
                out.write(data)
    with pytest.raises(ConfigError, match="or one that is compressed or encrypted"):
        load(other)


def test_a_changed_weight_is_found(path: Path, package: Package, tmp_path: Path) -> None:
    changed = bytearray(path.read_bytes())
    changed[4096 + package.manifest.weights[-1].start] ^= 1
    other = tmp_path / "changed.pt2"
    other.write_bytes(bytes(changed))
    with pytest.raises(ConfigError, match=r"weight '.*' has other bytes than the manifest states"):
        load(other)


def test_changed_code_is_found_before_it_runs(path: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        code = next(part for part in archive.infolist() if part.filename.endswith(".so"))
    changed = bytearray(path.read_bytes())
    changed[code.header_offset + 200 + code.file_size // 2] ^= 1
    other = tmp_path / "changed.pt2"
    other.write_bytes(bytes(changed))
    with pytest.raises(ConfigError, match=r"changed\.pt2: got a damaged part"):
        load(other)


EXPORT = """
import sys
from tests.export.export_models import every_batch, every_kind
from tilerec.export import export
export(every_kind(), every_batch(3).args(), sys.argv[1])
"""


@pytest.mark.nightly
@pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="exports in several processes: nightly")
@pytest.mark.skipif(not TORCH_213, reason="torch names arrays of sizes by the addresses of bound methods")
def test_every_process_writes_the_same_bytes(tmp_path: Path) -> None:
    """With one hash seed: torch names one of an assertion's numbers by the order of a set."""
    files = [tmp_path / "first.pt2", tmp_path / "second.pt2"]
    for file in files:
        cache = tmp_path / f"cache-of-the-{file.stem}"
        own = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONHASHSEED": "7"}
        subprocess.run([sys.executable, "-c", EXPORT, str(file)], cwd=ROOT, env={**os.environ, **own}, check=True)
    with zipfile.ZipFile(files[0]) as first, zipfile.ZipFile(files[1]) as second:
        assert first.namelist() == second.namelist()
        assert [name for name in first.namelist() if first.read(name) != second.read(name)] == []
    assert files[0].read_bytes() == files[1].read_bytes()
    assert str(tmp_path).encode() not in files[1].read_bytes()


# -------------------------------------------------------------------------------------------- on arrays, without torch

ARRAYS = """
import sys
import numpy as np
from tilerec.errors import InputError
from tilerec.export.array_package import load_arrays

package = load_arrays(sys.argv[1])
given = np.load(sys.argv[2])
batches = [[given[f"{at}.{spec.name}"] for spec in package.manifest.signature.specs()] for at in range(4)]
found = [package.run(batch) for batch in batches]
try:
    package.run([own + 99 if own.dtype == np.int64 else own for own in batches[2]])
except InputError as error:
    print(error)
assert "torch" not in sys.modules
import tilerec.ops  # defines the ops again, beside the library
import torch
found += [package.run(batch) for batch in batches]
np.savez(sys.argv[3], **{f"{at}.{i}": own for at, outputs in enumerate(found) for i, own in enumerate(outputs)})
"""


def test_a_process_without_torch_gets_the_package_s_bits_and_the_reason_of_an_error(
    path: Path, package: Package, tmp_path: Path
) -> None:
    names = [spec.name for spec in package.manifest.signature.specs()]
    every = [flat_tensors(package.manifest.signature, every_batch(size, size).args()) for size in SAMPLES]
    given = {
        f"{at}.{name}": own.numpy() for at, batch in enumerate(every) for name, own in zip(names, batch, strict=True)
    }
    np.savez(tmp_path / "given.npz", **given)  # type: ignore[arg-type]
    command = [sys.executable, "-c", ARRAYS, str(path), str(tmp_path / "given.npz"), str(tmp_path / "found.npz")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"got id \d+ of feature|got ids? ", done.stdout), done.stdout
    found = np.load(tmp_path / "found.npz")
    for at, batch in enumerate(every * 2):
        for i, want in enumerate(package.run(batch)):
            assert found[f"{at}.{i}"].tobytes() == want.numpy().tobytes()


def test_arrays_of_another_number_type_or_shape_are_refused(path: Path) -> None:
    own = load_arrays(path)
    good = [array.numpy() for array in flat_tensors(own.manifest.signature, every_batch(2).args())]
    name = own.manifest.signature.specs()[0].name
    with pytest.raises(InputError, match=rf"got 1 arrays; expected {len(good)}: \['{name}'"):
        own.run(good[:1])
    with pytest.raises(InputError, match=f"Input '{name}': got float64; expected float32"):
        own.run([good[0].astype(np.float64), *good[1:]])
    with pytest.raises(InputError, match=rf"Input '{name}': got shape \[2, 1\]; expected \[batch, 3\]"):
        own.run([good[0][:, :1], *good[1:]])
    assert [array.tobytes() for array in own.run(good)] == [
        array.tobytes() for array in own.run([np.asfortranarray(array) for array in good])
    ]


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda m: m.update(abi=0), "got a package for version 0 of tilerec's ops"),
        (lambda m: m.update(torch="1.0"), "got a package of torch 1.0; expected torch "),
        (lambda m: m.update(cpu="SVE"), "got a package for SVE; expected code for "),
        (lambda m: m["weights"][0].update(sha256="0" * 64), "weight '.*' has other bytes than the manifest states"),
        (lambda m: m["signature"]["inputs"][0]["tensors"][0].update(dtype="int8"), "describes another model"),
    ],
)  # fmt: skip
def test_a_package_that_does_not_fit_runs_on_no_arrays(
    path: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        load_arrays(repacked(path, tmp_path / "other.pt2", edit))


def test_a_package_without_its_compiled_part_runs_on_no_arrays(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt2"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for i, part in enumerate(old.infolist()):
            data = b"no code" if part.filename.endswith(".so") else old.read(part)
            with new.open(part, "w", force_zip64=i == 0) as out:
                out.write(data)
    with pytest.raises(ConfigError, match=r"other\.pt2: got '.*' from torch; expected a compiled model"):
        load_arrays(other)


def test_arrays_of_a_package_that_is_no_longer_used_are_freed(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.pt2"
    shutil.copy(path, copy)
    own = load_arrays(copy)
    own.run([array.numpy() for array in flat_tensors(own.manifest.signature, every_batch(2).args())])
    maps = Path("/proc/self/maps")
    assert str(copy) in maps.read_text()
    del own
    gc.collect()
    assert str(copy) not in maps.read_text()


# ------------------------------------------------------------------------------------------- in Triton Inference Server


def test_a_model_of_triton_returns_the_package_s_bits_and_an_error_per_bad_request(
    path: Path, package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton_utils())
    version = write_triton(path, tmp_path)
    model = runpy.run_path(str(version / "model.py"))["TritonPythonModel"]()
    threads = {"parameters": {"threads": {"string_value": str(torch.get_num_threads())}}}
    names = {"model_repository": str(version.parent), "model_version": version.name}
    model.initialize({**names, "model_config": json.dumps(threads)})
    every = [flat_tensors(package.manifest.signature, every_batch(size, size).args()) for size in SAMPLES]
    keys = [spec.name for spec in package.manifest.signature.specs()]
    requests = [request(dict(zip(keys, map(Tensor.numpy, own), strict=True))) for own in every]
    bad = {**requests[2], "pooled.values": StubTensor("pooled.values", every[2][1].numpy() + 99)}
    short = {name: own for name, own in requests[1].items() if name != "dense"}
    first, second, *answers = model.execute([bad, short, *requests])
    assert second.error.text == "Input 'dense': got none; expected a tensor. Send all inputs."
    assert first.error is not None
    for tensors, answer in zip(every, answers, strict=True):
        assert [own.name for own in answer.output_tensors] == [own.name for own in package.manifest.outputs]
        for own, want in zip(answer.output_tensors, package.run(tensors), strict=True):
            assert torch.equal(torch.from_numpy(own.as_numpy()), want)


# --------------------------------------------------------------------------------------------------------------- in C++


class Server:
    """A connection to the program of examples/cpp_server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._answers = self._socket.makefile("rb")

    def send(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._socket.sendall(
                struct.pack(f"<{tensor.dim()}q", *tensor.shape) + tensor.contiguous().numpy().tobytes()
            )

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def ask_sizes(self, *sizes: int) -> str:
        """Return the error for the sizes of a tensor, after which the server ends the connection."""
        self._socket.sendall(struct.pack(f"<{len(sizes)}q", *sizes))
        (length,) = struct.unpack("<q", self._answers.read(8))
        error = self._answers.read(length).decode()
        assert self._answers.read(1) == b""
        return error

    def ask(self, tensors: list[Tensor], outputs: tuple[TensorSpec, ...]) -> list[Tensor] | str:
        self.send(tensors)
        (length,) = struct.unpack("<q", self._answers.read(8))
        if length:
            return self._answers.read(length).decode()
        return [self._tensor(spec) for spec in outputs]

    def _tensor(self, spec: TensorSpec) -> Tensor:
        sizes = struct.unpack(f"<{len(spec.shape)}q", self._answers.read(8 * len(spec.shape)))
        out = torch.empty(sizes, dtype=getattr(torch, spec.dtype))
        if out.numel():
            out.view(-1).view(torch.uint8).copy_(
                torch.frombuffer(bytearray(self._answers.read(out.nbytes)), dtype=torch.uint8)
            )
        return out


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    binary = tmp_path_factory.mktemp("server") / "server"
    source = ROOT / "examples" / "cpp_server" / "server.cpp"
    subprocess.run([compiler, source, "-o", binary, *cpp_flags()], check=True)
    return binary


@pytest.fixture(scope="module")
def server(binary: Path, path: Path) -> Iterator[Server]:
    with subprocess.Popen([binary, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        with closing(Server(int(process.stdout.readline().split()[1]))) as server:
            yield server
        process.kill()


@pytest.mark.parametrize("samples", SAMPLES)
def test_a_cpp_program_returns_the_model_s_bits(
    server: Server, model: EveryKind, package: Package, samples: int
) -> None:
    batch = every_batch(samples, samples)
    manifest = package.manifest
    found = server.ask(flat_tensors(manifest.signature, batch.args()), manifest.outputs)
    for value, want in zip(found, wanted(model, batch).values(), strict=True):
        assert isinstance(value, Tensor)
        assert torch.equal(value, want)


def test_a_cpp_program_names_what_is_wrong_with_a_batch_and_goes_on(
    server: Server, model: EveryKind, package: Package
) -> None:
    batch, manifest = every_batch(3, 3), package.manifest
    tensors = flat_tensors(manifest.signature, batch.args())
    bad_ids = [tensors[0], tensors[1] + 99, *tensors[2:]]
    assert re.fullmatch(BAD_ID, str(server.ask(bad_ids, manifest.outputs)))
    bad_sizes = [torch.zeros(4, 3), *tensors[1:]]
    assert server.ask(bad_sizes, manifest.outputs) == (
        "Input 'pooled.lengths': got Int [2, 3]; expected contiguous int32 [2, batch] on the CPU, with one size per "
        "name."
    )
    short = [*tensors[:2], tensors[2] + 1, *tensors[3:]]
    assert re.search(r"offsets?\b.* (descends|must not fall)", str(server.ask(short, manifest.outputs)))
    found = server.ask(tensors, manifest.outputs)
    assert torch.equal(found[0], wanted(model, batch)["logits"])  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(1 << 26, 1 << 26), (2**63 - 1, 2**63 - 1), (-1, 3), (0, 2**63 - 1)])
def test_a_cpp_program_names_sizes_of_no_batch_and_goes_on(
    server: Server, package: Package, sizes: tuple[int, int]
) -> None:
    with closing(Server(server.port)) as hostile:
        assert "got sizes below 0, or more than 1 GB" in hostile.ask_sizes(*sizes)
    outputs = package.manifest.outputs
    assert isinstance(server.ask(flat_tensors(package.manifest.signature, every_batch(1).args()), outputs), list)


def test_clients_that_leave_before_their_answers_end_no_cpp_program(server: Server, package: Package) -> None:
    tensors = flat_tensors(package.manifest.signature, every_batch(64, 64).args())
    for _ in range(4):
        with closing(Server(server.port)) as hostile:
            for _ in range(50):
                hostile.send(tensors)
    assert isinstance(server.ask(tensors, package.manifest.outputs), list)


def test_a_cpp_program_refuses_half_a_package(binary: Path, path: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.pt2"
    torn.write_bytes(path.read_bytes()[:9000])
    done = subprocess.run([binary, torn], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "expected the whole file of tilerec.export.export()" in done.stderr


def test_the_op_library_is_there_with_a_checkout_or_a_wheel() -> None:
    # Stripped, without kernels that no op calls: docs/export.md lists its parts.
    assert ops_path().stat().st_size < 1_200_000
