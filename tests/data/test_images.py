import io
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_files import FILES, as_folder, as_tar, as_zip, picture
from PIL import Image

from bruno.data.images import common_backdrop, decode, has_colour, read_images

every_kind = pytest.mark.parametrize("pack", [as_folder, as_zip, as_tar])


@every_kind
def test_a_class_is_a_folder_and_elements_are_sorted_by_name(pack, tmp_path):
    examples = read_images(pack(tmp_path, FILES))
    assert examples.names == ("cats", "dogs")
    assert examples.labels.tolist() == [0, 0, 1]
    assert examples.elements.shape == (3, 1, 4, 6)
    assert examples.elements[:, 0, 0, 0].tolist() == [10, 20, 30]


folder_names = st.sampled_from(["a", "b", "a/b", "b/a", "a b", "ü"])
class_folders = st.dictionaries(
    st.tuples(folder_names, st.sampled_from(["1.png", "2.png", "10.png"])), st.integers(0, 255), min_size=1
)


@pytest.mark.slow
@given(class_folders, st.randoms(use_true_random=False))
def test_a_folder_and_its_archives_give_the_same_examples(tmp_path_factory, files, random):
    content = {f"{folder}/{name}": picture(value) for (folder, name), value in files.items()}
    shuffled = dict(random.sample(sorted(content.items()), len(content)))
    path = tmp_path_factory.mktemp("packed")
    wrapped = {f"top/{name}": file for name, file in shuffled.items()}
    folder = read_images(as_folder(path / "folder", shuffled))
    for archive in (as_zip(path, shuffled), as_tar(path, wrapped)):
        examples = read_images(archive)
        assert examples.names == folder.names
        assert torch.equal(examples.labels, folder.labels)
        assert torch.equal(examples.elements, folder.elements)


def test_images_are_resized_converted_and_inverted(tmp_path):
    path = as_folder(tmp_path, {"a/1.png": picture(40, (9, 9), "RGB")})
    assert read_images(path, size=5, grey=False).elements[0, :, 2, 2].tolist() == [40, 0, 255]
    assert read_images(path, size=(3, 2)).shape == (1, 3, 2)
    dark = as_folder(tmp_path / "dark", {"a/1.png": picture(0)})
    assert read_images(dark).inverted().elements.unique().tolist() == [255]


@every_kind
def test_colours_are_noticed_in_most_images(pack, tmp_path):
    bad, coloured = b"no image", picture(250, mode="RGB")
    assert has_colour(pack(tmp_path, {"a/1.png": coloured, "a/2.png": coloured, "b/1.png": bad}))
    grey = tmp_path / "grey"
    grey.mkdir()
    assert not has_colour(pack(grey, {"a/1.png": coloured, **FILES}))


@every_kind
def test_a_bad_image_raises_or_is_skipped(pack, tmp_path):
    path = pack(tmp_path, {**FILES, "dogs/broken.png": FILES["dogs/1.png"][:30]})
    with pytest.raises(ValueError, match=r"dogs/broken.png cannot be used"):
        read_images(path)
    examples = read_images(path, skip_bad=True)
    assert len(examples) == 3
    assert [name.removeprefix("wrapper/") for name in examples.skipped] == ["dogs/broken.png"]


def test_images_of_different_sizes_need_a_size(tmp_path):
    path = as_folder(tmp_path, {**FILES, "dogs/2.png": picture(1, (7, 7))})
    with pytest.raises(ValueError, match=r"dogs/2.png .*\(4, 6\); got \(7, 7\)"):
        read_images(path)
    assert len(read_images(path, size=4)) == 4


def test_skipping_keeps_the_most_common_size(tmp_path):
    path = as_folder(tmp_path, {**FILES, "a/first.png": picture(1, (7, 7))})
    examples = read_images(path, skip_bad=True)
    assert len(examples) == 3
    assert examples.skipped == ("a/first.png",)


def test_a_dangling_link_or_a_folder_named_like_an_image_raises_or_is_skipped(tmp_path):
    path = as_folder(tmp_path / "link", FILES)
    (path / "cats" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(ValueError, match=r"cats/gone.png cannot be used: .*No such file"):
        read_images(path)
    assert read_images(path, skip_bad=True).skipped == ("cats/gone.png",)
    path = as_folder(tmp_path / "folder", FILES)
    (path / "dogs" / "x.png").mkdir()
    with pytest.raises(ValueError, match=r"dogs/x.png cannot be used: .*got a folder"):
        read_images(path)
    assert read_images(path, skip_bad=True).skipped == ("dogs/x.png",)


@every_kind
def test_hidden_files_are_ignored(pack, tmp_path):
    hidden = {"dogs/._1.png": b"macOS", "dogs/.ipynb_checkpoints/1.png": picture(1), "__MACOSX/a/1.png": b""}
    assert read_images(pack(tmp_path, {**FILES, **hidden})).names == ("cats", "dogs")


def test_images_outside_class_folders_are_rejected_in_folders_and_archives(tmp_path):
    loose = {"1.png": picture(1), "2.png": picture(2)}
    with zipfile.ZipFile(tmp_path / "loose.zip", "w") as archive:
        for name, content in loose.items():
            archive.writestr(name, content)
    for path in (as_folder(tmp_path / "a", loose), tmp_path / "loose.zip", as_tar(tmp_path, loose)):
        with pytest.raises(ValueError, match=rf"{path.name}: .*CLASS/IMAGE.png; found none"):
            read_images(path)


@pytest.mark.parametrize(("ink", "paper"), [(255, 0), (0, 255)])
def test_transparent_pixels_get_the_colour_that_contrasts_with_the_opaque_ones(ink, paper):
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[1:3, 1:3] = (ink, ink, ink, 255)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    read = decode(file.getvalue(), None, grey=True)[0]
    assert (read[1:3, 1:3] == ink).all()
    assert (read[0] == paper).all()


def icon(luminance: int, paper: int = 0) -> bytes:
    """A square on a background of this opacity."""
    pixels, file = np.full((4, 4, 4), (0, 0, 0, paper), np.uint8), io.BytesIO()
    pixels[1:3, 1:3] = (luminance, luminance, luminance, 255)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@every_kind
def test_all_transparent_images_get_the_backdrop_that_contrasts_with_most(pack, tmp_path):
    shades = (110, 120, 130, 140, 150)  # some contrast more with white, and some with black
    path = pack(tmp_path, {f"icons/{shade}.png": icon(shade) for shade in shades})
    assert set(read_images(path).elements[:, 0, 0, 0].tolist()) == {0, 255}
    assert common_backdrop(path) == "black"
    for backdrop, value in (("black", 0), ("white", 255)):
        elements = read_images(path, backdrop=backdrop).elements
        assert set(elements[:, 0, 0, 0].tolist()) == {value}
        assert elements[:, 0, 1, 1].tolist() == list(shades)


def test_only_transparent_images_choose_the_backdrop(tmp_path):
    opaque = {f"a/{i}.png": icon(255, paper=255) for i in range(3)}
    assert common_backdrop(as_folder(tmp_path / "opaque", FILES | opaque)) == ""
    mixed = opaque | {"a/damaged.png": icon(9)[:50], "a/dark.png": icon(9), "a/x.gif": b""}
    assert common_backdrop(as_folder(tmp_path / "mixed", mixed)) == "white"
    (tmp_path / "damaged.zip").write_bytes(b"PK")
    assert common_backdrop(tmp_path / "damaged.zip") == ""


def test_a_photograph_is_rotated_upright():
    image, exif, file = Image.new("L", (6, 4)), Image.Exif(), io.BytesIO()
    exif[0x0112] = 6  # taken with the camera on its side
    image.save(file, "PNG", exif=exif)
    assert decode(file.getvalue(), None, grey=True).shape == (1, 6, 4)


def test_16_bits_are_scaled_to_8_and_32_bits_are_rejected(tmp_path):
    values = np.array([[0, 257, 32896, 65535]], np.uint16)
    (tmp_path / "a").mkdir()
    for kind in ("png", "tiff"):
        Image.fromarray(values).save(tmp_path / "a" / f"1.{kind}")
    (tmp_path / "a" / "1.pgm").write_bytes(b"P5 4 1 65535 " + values.byteswap().tobytes())
    assert read_images(tmp_path).elements[:, 0, 0].tolist() == [[0, 1, 128, 255]] * 3
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "a" / "2.tiff")
    with pytest.raises(ValueError, match=r"2.tiff cannot be used: .*32 bits"):
        read_images(tmp_path)


def test_an_empty_folder_and_a_truncated_archive_are_named(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path.name}: .*found none"):
        read_images(tmp_path)
    (tmp_path / "cut.zip").write_bytes(as_zip(tmp_path, FILES).read_bytes()[:100])
    with pytest.raises(ValueError, match=r"cut.zip: must be a folder, zip or tar"):
        read_images(tmp_path / "cut.zip")
