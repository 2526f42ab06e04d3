"""One array of bf16 patterns, uint16 [token, layer, hidden], as each system stores it and as its ordinary reader reads.

Each form imports its library only when it is used. Where a system knows no bfloat16, it holds uint16.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]
CHUNK_TOKENS, SHARD_TOKENS = 16, 32


@dataclass(frozen=True, slots=True)
class Form:
    """A way to store the array.

    Attributes
    ----------
    name
        In the table.
    package
        The distribution whose version counts.
    write, read
        Into a folder that is there, and out of it.
    shards
        Folder of the shards inside, where it is a Zarr array in two shards along the first axis.
    """

    name: str
    package: str
    write: Callable[[Path, Bits], None]
    read: Callable[[Path], Bits]
    shards: str | None = None


def _write_safetensors(folder: Path, bits: Bits) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)}, folder / "a.safetensors")


def _read_safetensors(folder: Path) -> Bits:
    from safetensors.torch import load_file

    return _bits(load_file(folder / "a.safetensors")["a"])


def _bits(tensor: Any) -> Bits:
    """Return a tensor's patterns; of another type than bfloat16, an array that equals none."""
    import torch

    return (
        tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else np.empty(0, np.uint16)
    )


def _write_torch(folder: Path, bits: Bits) -> None:
    import torch

    torch.save({"a": torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)}, folder / "a.pt")


def _read_torch(folder: Path) -> Bits:
    import torch

    return _bits(torch.load(folder / "a.pt", weights_only=True)["a"])


def _write_npz(folder: Path, bits: Bits) -> None:
    np.savez(folder / "a.npz", a=bits)


def _read_npz(folder: Path) -> Bits:
    with np.load(folder / "a.npz") as arrays:
        return arrays["a"]


def _zarr_writer(*, codecs: tuple[str, ...], sharded: bool) -> Callable[[Path, Bits], None]:
    def write(folder: Path, bits: Bits) -> None:
        import zarr
        from zarr.codecs import Crc32cCodec, ZstdCodec

        made = {"zstd": ZstdCodec, "crc32c": Crc32cCodec}
        _, layers, hidden = bits.shape
        array = zarr.create_array(
            folder / "a",
            shape=bits.shape,
            dtype="uint16",
            chunks=(CHUNK_TOKENS, 1, hidden),
            shards=(SHARD_TOKENS, layers, hidden) if sharded else None,
            compressors=[made[name]() for name in codecs] or None,
        )
        array[:] = bits

    return write


def _read_zarr(folder: Path, pipeline: str = "zarr.core.codec_pipeline.BatchedCodecPipeline") -> Bits:
    import zarr

    zarr.config.set({"codec_pipeline.path": pipeline})
    return np.asarray(zarr.open_array(folder / "a", mode="r")[:])


def _read_zarrs(folder: Path) -> Bits:
    import zarr

    zarr.config.set({"codec_pipeline.strict": True})
    return _read_zarr(folder, "zarrs.ZarrsCodecPipeline")


def _read_tensorstore(folder: Path) -> Bits:
    import tensorstore

    spec = {"driver": "zarr3", "kvstore": f"file://{(folder / 'a').absolute()}/"}
    return np.asarray(tensorstore.open(spec, open=True).result().read().result())


def _rows(bits: Bits) -> Any:
    """Return the array as an Arrow table: a row of bytes a token."""
    import pyarrow as pa

    width = bits[0].nbytes
    return pa.table({"a": pa.array([row.tobytes() for row in bits], pa.binary(width))})


def _of_rows(table: Any) -> Bits:
    """Return the rows joined, in the shape that all forms here have by agreement."""
    data = b"".join(table.column("a").to_pylist())
    return np.frombuffer(data, np.uint16)


def _write_parquet(folder: Path, bits: Bits, *, checksum: bool = False) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(_rows(bits), folder / "a.parquet", write_page_checksum=checksum)


def _read_parquet(folder: Path, *, checksum: bool = False) -> Bits:
    import pyarrow.parquet

    return _of_rows(pyarrow.parquet.read_table(folder / "a.parquet", page_checksum_verification=checksum))


def _write_arrow(folder: Path, bits: Bits) -> None:
    import pyarrow.ipc

    table = _rows(bits)
    with pyarrow.ipc.new_file(folder / "a.arrow", table.schema) as file:
        file.write_table(table)


def _read_arrow(folder: Path) -> Bits:
    import pyarrow.ipc

    with pyarrow.ipc.open_file(folder / "a.arrow") as file:
        return _of_rows(file.read_all())


def _write_lance(folder: Path, bits: Bits) -> None:
    import lance

    lance.write_dataset(_rows(bits), folder / "a.lance")


def _read_lance(folder: Path) -> Bits:
    import lance

    return _of_rows(lance.dataset(folder / "a.lance").to_table())


def _hdf5_writer(**filters: Any) -> Callable[[Path, Bits], None]:
    def write(folder: Path, bits: Bits) -> None:
        import h5py

        with h5py.File(folder / "a.h5", "w") as file:
            file.create_dataset("a", data=bits, chunks=(CHUNK_TOKENS, 1, bits.shape[2]), **filters)

    return write


def _read_hdf5(folder: Path) -> Bits:
    import h5py

    with h5py.File(folder / "a.h5") as file:
        return np.asarray(file["a"][:])


def _write_array_record(folder: Path, bits: Bits) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    for row in bits:
        writer.write(row.tobytes())
    writer.close()


def _read_array_record(folder: Path) -> Bits:
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(folder / "a.array_record"))
    try:
        return np.frombuffer(b"".join(reader.read_all()), np.uint16)
    finally:
        reader.close()


def _hsfmt_writer(codec: str) -> Callable[[Path, Bits], None]:
    def write(folder: Path, bits: Bits) -> None:
        from hsfmt import DatasetWriter

        tokens, layers, hidden = bits.shape
        settings = {"layers": range(layers), "hidden_size": hidden, "final_norm": "pre", "codec": codec}
        grid = {"chunk_tokens": CHUNK_TOKENS, "shard_tokens": SHARD_TOKENS}
        with DatasetWriter(folder / "a", part_names=lambda: "p", **settings, **grid) as writer:
            writer.write("s", np.arange(tokens), bits)

    return write


def _read_hsfmt(folder: Path) -> Bits:
    from hsfmt import HiddenStateDataset

    return _bits(HiddenStateDataset(folder / "a")[0]["hidden_states"])


_SHARDED = _zarr_writer(codecs=("zstd",), sharded=True)
_CHECKED = _zarr_writer(codecs=("zstd", "crc32c"), sharded=True)
_ZSTD = _zarr_writer(codecs=("zstd",), sharded=False)
_OURS = "a/parts/p/hidden_states"
FORMS = {
    form.name: form
    for form in (
        Form("safetensors", "safetensors", _write_safetensors, _read_safetensors),
        Form(".npy", "numpy", lambda f, b: np.save(f / "a.npy", b), lambda f: np.load(f / "a.npy")),
        Form(".npz", "numpy", _write_npz, _read_npz),
        Form(".pt, weights_only", "torch", _write_torch, _read_torch),
        Form("zarr-python, raw", "zarr", _zarr_writer(codecs=(), sharded=False), _read_zarr),
        Form("zarr-python, zstd", "zarr", _ZSTD, _read_zarr),
        Form("zarr-python, sharded zstd", "zarr", _SHARDED, _read_zarr, "a"),
        Form("zarr-python, sharded zstd + crc32c", "zarr", _CHECKED, _read_zarr, "a"),
        Form("zarrs, sharded zstd", "zarrs", _SHARDED, _read_zarrs, "a"),
        Form("zarrs, sharded zstd + crc32c", "zarrs", _CHECKED, _read_zarrs, "a"),
        Form("tensorstore, sharded zstd", "tensorstore", _SHARDED, _read_tensorstore, "a"),
        Form("tensorstore, sharded zstd + crc32c", "tensorstore", _CHECKED, _read_tensorstore, "a"),
        Form("Lance", "pylance", _write_lance, _read_lance),
        Form("HDF5, raw", "h5py", _hdf5_writer(), _read_hdf5),
        Form("HDF5, gzip", "h5py", _hdf5_writer(compression="gzip"), _read_hdf5),
        Form("HDF5, fletcher32", "h5py", _hdf5_writer(fletcher32=True), _read_hdf5),
        Form("Parquet, defaults", "pyarrow", _write_parquet, _read_parquet),
        Form(
            "Parquet, page CRC written and verified",
            "pyarrow",
            lambda f, b: _write_parquet(f, b, checksum=True),
            lambda f: _read_parquet(f, checksum=True),
        ),
        Form("Arrow IPC file", "pyarrow", _write_arrow, _read_arrow),
        Form("array_record", "array_record", _write_array_record, _read_array_record),
        Form("hsfmt, none", "hsfmt", _hsfmt_writer("none"), _read_hsfmt, _OURS),
        Form("hsfmt, zstd", "hsfmt", _hsfmt_writer("zstd"), _read_hsfmt, _OURS),
    )
}


def swap_inner_chunks(shard: bytes, n_chunks: int) -> bytes:
    """Return a shard whose index has its first two chunks in each other's place, under a crc32c that fits."""
    import google_crc32c

    index = bytearray(shard[-16 * n_chunks - 4 : -4])
    index[:16], index[16:32] = index[16:32], index[:16]
    return shard[: -16 * n_chunks - 4] + bytes(index) + google_crc32c.value(bytes(index)).to_bytes(4, "little")


def edit_shape(document: bytes, tokens: int, to: int) -> bytes:
    """Return a JSON document in which the array has another number of tokens; lengths stay the same."""
    text = document.decode()
    before = json.dumps([tokens])[:-1]
    for spelled in (f'"shape":{before},', f'"shape": {before},', f'"shape": [\n    {tokens},'):
        text = text.replace(spelled, spelled.replace(str(tokens), str(to)))
    return text.encode()
