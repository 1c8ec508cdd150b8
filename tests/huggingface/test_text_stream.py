"""`hsa generate` with pre-trained decoders."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hsa.cli.main import run
from hsa.errors import InvalidInput
from hsa.generation.generate_text import generate
from hsa.generation.sampling import Sampling
from hsa.huggingface import convert
from hsa.huggingface.text_stream import load_pretrained_writer
from hsa.signals.readers.tokens import train_tokenizer

PROMPT = "The cat sat on the mat, and the mat lay on the floor; " * 4


def save(folder, tokenizer=None, **settings):
    """Save a tiny Llama with more embedding rows than tokens."""
    torch.manual_seed(0)
    backend = tokenizer or train_tokenizer([PROMPT], 290, special_tokens=("<|stop|>",))
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=500,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    if settings:
        convert(model, **settings)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|stop|>").save_pretrained(folder)
    return model


def test_the_text_equals_that_of_generate(tmp_path):
    model = save(tmp_path, branching=(4, 2, 2), tile=8, top_k=2)
    writer, tokenizer, ends = load_pretrained_writer(str(tmp_path))
    assert ends == {2, tokenizer.token_to_id("<|stop|>")}  # of the generation config, and of the tokenizer
    stream = generate(writer, tokenizer, PROMPT, max_new_tokens=25, sampling=Sampling(temperature=0), ends=ends)
    text = "".join(stream)
    ids = torch.tensor([stream.prompt])
    model.generation_config.eos_token_id = sorted(ends)
    forbidden = {"suppress_tokens": list(range(tokenizer.get_vocab_size(), 320))}
    wanted = model.generate(ids, max_new_tokens=25, do_sample=False, **forbidden)[0, ids.shape[1] :]
    assert stream.ids == wanted.tolist()
    assert text.strip()
    assert stream.cache.lengths == [len(stream.prompt) + 24]
    assert stream.cache.memory().leaves_kept


def test_from_the_command_line(tmp_path, capsys):
    save(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        run(["generate", str(tmp_path), "--prompt", "The cat", "--max-new-tokens", "5", "--seed", "3", "--cpu"])
    out = capsys.readouterr()
    assert stopped.value.code == 0
    assert out.out
    assert "5 generated" in out.err
    assert "every key and value is kept" in out.err


def test_a_tokenizer_that_is_not_byte_level(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    save(tmp_path, tokenizer=Tokenizer(WordLevel({"a": 0, "<|stop|>": 1}, unk_token="a")))
    with pytest.raises(
        InvalidInput, match=r"expected a tokenizer with byte-level BPE, .*, got another kind of tokenizer"
    ):
        load_pretrained_writer(str(tmp_path))


def test_a_prompt_longer_than_the_positions(tmp_path):
    save(tmp_path)
    writer, tokenizer, ends = load_pretrained_writer(str(tmp_path))
    with pytest.raises(InvalidInput, match="at most 500"):
        generate(writer, tokenizer, PROMPT * 20, ends=ends)


def test_special_tokens_come_before_the_prompt(tmp_path):
    from tokenizers.processors import TemplateProcessing

    backend = train_tokenizer([PROMPT], 290, special_tokens=("<|stop|>",))
    stop = backend.token_to_id("<|stop|>")
    backend.post_processor = TemplateProcessing(single="<|stop|> $A", special_tokens=[("<|stop|>", stop)])
    save(tmp_path, tokenizer=backend)
    writer, tokenizer, ends = load_pretrained_writer(str(tmp_path))
    stream = generate(writer, tokenizer, "The cat", ends=ends, special_tokens=True)
    assert stream.prompt == [stop, *tokenizer.encode("The cat", add_special_tokens=False).ids]
