"""Small image files, and ways to pack files: a folder, a zip, a tar, an idx file."""

import gzip
import io
import struct
import tarfile
import zipfile

import numpy as np
from PIL import Image


def picture(value: int, size=(6, 4), mode="L") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value, 0, 255)).save(file, "PNG")
    return file.getvalue()


FILES = {"cats/1.png": picture(10), "cats/2.png": picture(20), "dogs/1.png": picture(30)}


def as_folder(path, files):
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def as_zip(path, files):
    path = path / "images.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"wrapper/{name}", content)
    return path


def as_tar(path, files):
    path = path / "images.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def as_idx(array: np.ndarray) -> bytes:
    return gzip.compress(
        struct.pack(f">{array.ndim + 1}I", 0x800 + array.ndim, *array.shape) + array.tobytes()
    )
