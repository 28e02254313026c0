"""A folder with a subfolder of images for each class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fedcohort.core.arrays import AnyArray
from fedcohort.core.errors import DataError, InputError, MissingExtraError
from fedcohort.simulate.memory_check import check_memory

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"})
_TESTS = ("test", "val", "valid", "validation")
_SIDE = 64  # pixels, to which images of several sizes are scaled; ten thousand in colour need 120 MB

Pictures = tuple[AnyArray, AnyArray]


def read_pictures(path: Path) -> tuple[Pictures, Pictures | None, tuple[str, ...]] | None:
    """Return images (n, height, width[, 3]) with the names of their classes (n,), those for testing, and remarks.

    The files are ``cat/1.png``, or ``train/cat/1.png`` and optionally ``test/cat/2.png``. Images of several sizes are
    scaled. None if there are no images.
    """
    train = path / "train" if (path / "train").is_dir() else path
    test = next((path / name for name in _TESTS if (path / name).is_dir()), None) if train != path else None
    files = [_classes(part) for part in (train, test) if part is not None]
    if not files[0]:
        return None
    if test is not None and not files[1]:
        raise DataError(f"The folder {test} has no images.", hint=f"give it the classes of {train}, or remove it")
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError(
            f"{path} is a folder of images, which need Pillow to be read. It is not installed.",
            hint="pip install pillow",
        ) from error

    @contextmanager
    def opened(file: Path) -> Iterator[Image.Image]:
        try:
            with Image.open(file) as image:  # reads the header only
                yield image
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{file} cannot be read as an image: {error}.", hint="repair or remove it") from error

    # Two passes: the headers say how much memory all images need, before one of them is decoded.
    whole = [file for part in files for file, _ in part]
    sizes, grey = set(), True
    for file in whole:
        with opened(file) as image:
            sizes.add(image.size)
            grey = grey and image.mode in ("1", "L", "LA")
    scaled = len(sizes) > 1
    # A batch needs one shape. Images of one size keep it.
    width, height = (_SIDE, _SIDE) if scaled else next(iter(sizes))
    shape = (height, width) if grey else (height, width, 3)
    check_memory(f"The images in {path}", len(whole) * int(np.prod(shape)))
    parts = []
    for part in files:
        x = np.empty((len(part), *shape), np.uint8)
        for row, (file, _) in zip(x, part, strict=True):
            with opened(file) as image:
                picture = image.convert("L" if grey else "RGB")
                row[:] = np.asarray(picture.resize((width, height)) if scaled else picture)
        parts.append((x, np.array([name for _, name in part])))
    remark = f"the images in {path} have several sizes, so all were scaled to {width} x {height} pixels"
    return parts[0], parts[1] if test is not None else None, (remark,) if scaled else ()


def _classes(folder: Path) -> list[tuple[Path, str]]:
    """Return every image below a folder of classes, with its class."""
    found = [
        (file, inside.name)
        for inside in sorted(folder.iterdir())
        if inside.is_dir() and not inside.name.startswith(".")
        for file in sorted(inside.rglob("*"))
        if file.suffix.lower() in _SUFFIXES and file.is_file()
    ]
    if found and len({name for _, name in found}) < 2:
        raise InputError(
            f"{folder} has images of one class only, {found[0][1]!r}.",
            hint="give it a subfolder of images for each class, such as train/cat and train/dog",
        )
    return found
