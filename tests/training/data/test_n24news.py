import json
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from hsa import collate
from hsa.errors import InvalidInput
from hsa.signals import Grid, Leaf, Signal, Table
from hsa.signals.readers import read_image, train_tokenizer
from hsa.training.data.data_set import build
from hsa.training.data.n24news import SPLITS, read_n24news

SECTIONS = ("Travel", "Food", "Art & Design")


def write(folder, *, body="article", images="imgs", per_split=3):
    """Write a sample in the published layout."""
    generator = np.random.default_rng(0)
    (folder / "news").mkdir()
    (folder / images).mkdir()
    for number, split in enumerate(SPLITS):
        articles = []
        for i in range(per_split):
            name = f"1000000{number}{i}"
            articles.append(
                {
                    "section": SECTIONS[i % len(SECTIONS)],
                    "headline": f"Headline {i} of {split}",
                    "abstract": "A summary in one sentence.",
                    "caption": "A view of the sea.",
                    body: "The first paragraph. It has two sentences.\n\nThe second paragraph.",
                    "image_id": name,
                    "article_id": f"a{name}",
                    "article_url": "https://example.com",
                }
            )
            pixels = generator.integers(0, 256, (50 + i, 70, 3), np.uint8)
            Image.fromarray(pixels).save(folder / images / f"{name}.jpg")
        (folder / "news" / f"nytimes_{split}.json").write_text(json.dumps(articles))
    return folder


def change(folder, split="train", index=1, **values):
    """Change values of one article; None removes the key."""
    path = folder / "news" / f"nytimes_{split}.json"
    articles = json.loads(path.read_text())
    articles[index] |= values
    articles[index] = {key: value for key, value in articles[index].items() if value is not None}
    path.write_text(json.dumps(articles))


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path)


class Paragraphs:
    """Text encoder that returns lengths."""

    def text_vectors(self, texts, *, prefix=""):
        return torch.tensor([[len(prefix + text), 1.0, 2.0] for text in texts])


class Images:
    """Image encoder that returns sizes."""

    def read_image(self, picture, *, grid=False, where=None):
        signal = read_image(picture, patch=1, largest=999, where=where)
        size = torch.tensor(signal.domain.shape, dtype=torch.float32)
        return Signal.of(size.expand(2, 3, 2), "image", Grid((2, 3))) if grid else Leaf(size, "image")


@pytest.mark.parametrize("names", [("article", "imgs"), ("body", "images")])
def test_articles_are_tables(tmp_path, names):
    write(tmp_path, body=names[0], images=names[1])
    for split in SPLITS:
        examples = list(read_n24news(tmp_path, split))
        assert [example.target for example in examples] == list(SECTIONS)
        assert f"nytimes_{split}.json: row 2 (article a1000" in examples[1].where
        signal = examples[0].signal
        assert signal.domain == Table(["headline", "abstract", "caption", "body", "image"])
        headline, _, caption, body, image = signal.members
        assert headline.values == ("Headline", "0", "of", split)
        assert caption.values == ("A", "view", "of", "the", "sea", ".")
        assert [len(paragraph.members) for paragraph in body.members] == [9, 4]
        assert (image.domain, image.modalities) == (Grid((3, 4)), ("patch",))


def test_encoders_produce_leaves(folder):
    tokenizer = train_tokenizer(["a view of the sea"], 300)
    read = partial(read_n24news, folder, "train", tokenizer=tokenizer, paragraph_encoder=Paragraphs())
    signal = next(read(image_encoder=Images(), prefix="passage: ")).signal
    assert signal.modalities == ("text", "paragraph", "image")
    assert signal.members[3].values.tolist() == [[51.0, 1, 2], [30.0, 1, 2]]
    assert signal.members[4] == Leaf(torch.tensor([50.0, 70.0]), "image")
    grid = next(read(image_reader=partial(Images().read_image, grid=True))).signal.members[4]
    assert (grid.domain, grid.modalities) == (Grid((2, 3)), ("image",))


def test_data_set(folder):
    tokenizer = train_tokenizer(["a view of the sea"], 300)
    read = partial(read_n24news, folder, tokenizer=tokenizer, image_encoder=Images())
    train = build(read("train"), "classification")
    test = build(read("test"), "classification", train.classes)
    assert train.classes == tuple(sorted(SECTIONS))
    assert torch.equal(train.targets, test.targets)
    assert train.batch.values["image"].shape == (3, 2)


def test_real_encoders(folder, tmp_path_factory):
    """Test with tiny models instead of e5 and ViT."""
    pytest.importorskip("transformers")
    from hsa.huggingface.encoders import ImageEncoder, TextEncoder
    from tests.huggingface.test_encoders import save_bert, save_vision

    text = TextEncoder(save_bert(tmp_path_factory.mktemp("bert")))
    image = ImageEncoder(save_vision(tmp_path_factory.mktemp("vit")))
    read = partial(read_n24news, folder, "dev", tokenizer=text.tokenizer, paragraph_encoder=text)
    batch = text.token_vectors(collate([example.signal for example in read(image_encoder=image)]))
    assert {name: list(values.shape[1:]) for name, values in batch.values.items()} == {
        "text": [10],
        "paragraph": [10],
        "image": [10],
    }


def test_missing_and_damaged_images(folder):
    change(folder, image_id="nowhere")
    (folder / "imgs" / "100000002.jpg").write_bytes(b"no picture")
    keys = [example.signal.domain.keys for example in read_n24news(folder, "train", on_bad="skip")]
    assert [len(names) for names in keys] == [5, 4, 4]
    assert "image" not in keys[1]
    examples = read_n24news(folder, "train")
    next(examples)
    with pytest.raises(
        InvalidInput, match=r"train.json: row 2 \(article a100000001\), image .*nowhere.jpg.*no such file"
    ):
        next(examples)
    change(folder, image_id="100000001")
    with pytest.raises(InvalidInput, match=r"row 3 .*100000002.jpg"):
        list(read_n24news(folder, "train"))


def test_an_article_without_an_image(folder):
    change(folder, image_id=None)
    assert [len(e.signal.domain.keys) for e in read_n24news(folder, "train", on_bad="skip")] == [5, 4, 5]
    assert [len(e.signal.domain.keys) for e in read_n24news(folder, "train", image_reader=None)] == [4, 4, 4]


def test_empty_texts_are_left_out(folder):
    change(folder, index=0, abstract="", article=" \n ")
    for encoder in (None, Paragraphs()):
        signal = next(read_n24news(folder, "train", paragraph_encoder=encoder)).signal
        assert signal.domain.keys == ("headline", "caption", "image")


def test_missing_files(folder):
    (folder / "news" / "nytimes_dev.json").unlink()
    with pytest.raises(InvalidInput, match=r"nytimes_dev.json: no such file.*billywzh717/N24News"):
        read_n24news(folder, "dev")
    with pytest.raises(InvalidInput, match=r"split: expected one of train, dev, test, got 'valid'"):
        read_n24news(folder, "valid")


def test_unknown_layouts(tmp_path):
    with pytest.raises(InvalidInput, match=r"none: no such folder.*billywzh717/N24News"):
        read_n24news(tmp_path / "none", "train")
    (tmp_path / "train.csv").touch()
    with pytest.raises(InvalidInput, match=r"the folder contains train\.csv; expected the folders news and imgs"):
        read_n24news(tmp_path, "train")
    (tmp_path / "train.csv").unlink()
    write(tmp_path, images="photos")
    with pytest.raises(InvalidInput, match=r"no folder imgs.*image_reader=None"):
        read_n24news(tmp_path, "train")
    assert next(read_n24news(tmp_path, "train", image_reader=None)).target == "Travel"


def test_broken_json(folder):
    path = folder / "news" / "nytimes_train.json"
    path.write_text(path.read_text()[:-10])
    with pytest.raises(InvalidInput, match=r"nytimes_train\.json"):
        read_n24news(folder, "train")
    path.write_text('{"articles": []}')
    with pytest.raises(InvalidInput, match=r"nytimes_train\.json.*a list of objects"):
        read_n24news(folder, "train")


@pytest.mark.parametrize("key", ["section", "headline", "caption", "article"])
def test_missing_keys(folder, key):
    change(folder, **{key: None})
    with pytest.raises(InvalidInput, match=rf"row 2 \(article a100000001\), '{key}': expected text, got null"):
        list(read_n24news(folder, "train"))
    change(folder, **{key: 7})
    with pytest.raises(InvalidInput, match=rf"'{key}': expected text, got a value of type int"):
        list(read_n24news(folder, "train"))
    for index in range(3):
        change(folder, index=index, **{key: None})
    with pytest.raises(InvalidInput, match=rf"nytimes_train\.json: .*'{key}'"):
        read_n24news(folder, "train")


@pytest.mark.parametrize("name", ["../../secret", "../secret", "/etc/secret", "link", "x" * 5000, "a\0b"])
def test_images_outside_the_folder_are_not_opened(tmp_path, name):
    (tmp_path / "data").mkdir()
    folder = write(tmp_path / "data")
    for path in (tmp_path / "secret.jpg", tmp_path / "other.jpg"):
        Image.new("RGB", (20, 30)).save(path)
    (folder / "imgs" / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    change(folder, image_id=name.replace("/etc", str(tmp_path)))
    with pytest.raises(InvalidInput, match=r"row 2 \(article a100000001\), image imgs/.*: no such file in the folder"):
        list(read_n24news(folder, "train"))
    keys = [example.signal.domain.keys for example in read_n24news(folder, "train", on_bad="skip")]
    assert [len(names) for names in keys] == [5, 4, 5]
