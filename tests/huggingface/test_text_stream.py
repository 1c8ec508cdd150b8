"""`hsa generate` with pre-trained decoders."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hsa.cli.main import run
from hsa.errors import InvalidInput
from hsa.generation.generate_text import generate
from hsa.generation.sampling import Sampling
from hsa.huggingface import convert
from hsa.huggingface.loading import check_room
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


@pytest.mark.parametrize("after", ["the prompt", "3 tokens"])
def test_out_of_memory(tmp_path, capsys, monkeypatch, after):
    from hsa.analysis import memory
    from hsa.huggingface.text_stream import PretrainedWriter

    save(tmp_path)
    read, step, lengths, steps = PretrainedWriter.read, PretrainedWriter.step, [], []

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def few(self, tokens, *rest):
        lengths.append(len(tokens))
        return read(self, tokens, *rest) if after == "3 tokens" or len(tokens) < 50 else full()

    def some(self, *rest):
        steps.append(1)
        return step(self, *rest) if len(steps) < 3 else full()

    monkeypatch.setattr(PretrainedWriter, "read", few)
    monkeypatch.setattr(PretrainedWriter, "step", some)
    monkeypatch.setattr(memory, "extra_memory", lambda run, device: run() or 1024.0 * lengths[-1])
    monkeypatch.setattr(memory, "free_memory", lambda device: 70_000.0)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run(["generate", str(tmp_path), "--prompt", PROMPT * 2, "--max-new-tokens", "9", "--cpu"])
    assert stopped.value.code == 2
    tokens = lengths[0] + len(steps)
    fits = 64 - len(steps)
    assert capsys.readouterr().err == (
        f"out of memory: {tokens} tokens need about {tokens} GiB beside the model, and 68 GiB are free. "
        f"Shorten the prompt to about {fits} tokens\n"
    )


def test_a_model_larger_than_the_memory_of_a_gpu(tmp_path):
    model = save(tmp_path)
    check_room("tiny", model, 1.0)
    check_room("tiny", model, None)
    with pytest.raises(
        InvalidInput, match=r"tiny: expected at most the 0\.0 GiB of .* that are free on the GPU, got weights of"
    ):
        check_room("tiny", model, 0.01)


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
