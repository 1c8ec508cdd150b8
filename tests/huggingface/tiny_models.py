"""Small random models of the supported families, with batches and tokenizers for them."""

import pytest
import torch

from hsa.huggingface.attend import attend_tree
from hsa.huggingface.layer_plan import Call, LayerPlan

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

VOCABULARY = 59
PAD, CLS, SEP = 0, 1, 2
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
IDS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": CLS, "eos_token_id": SEP}
COMMON = {"initializer_range": 0.4, **IDS}  # large enough for attention weights that are far from uniform
ENCODER = {**SHAPE, **COMMON, "max_position_embeddings": 97}
DECODER = {**ENCODER, "num_key_value_heads": 2, "head_dim": 8}
LENGTHS = [41, 29, 37]


def _bert(**changes):
    return transformers.BertModel(transformers.BertConfig(**{**ENCODER, **changes}))


def _roberta(**changes):
    return transformers.RobertaModel(transformers.RobertaConfig(**{**ENCODER, **changes}))


def _distilbert(**changes):
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, "max_position_embeddings": 97}
    return transformers.DistilBertModel(transformers.DistilBertConfig(**{**shape, **COMMON, **changes}))


def _electra(**changes):
    return transformers.ElectraModel(transformers.ElectraConfig(**{**ENCODER, "embedding_size": 24, **changes}))


def _modernbert(**changes):
    """Build a ModernBERT in which layers 0 and 3 see all tokens, and the others four tokens on each side."""
    wider = {"num_hidden_layers": 4, "local_attention": 8, "cls_token_id": CLS, "sep_token_id": SEP}
    wide = {"initializer_cutoff_factor": 9.0}
    return transformers.ModernBertModel(transformers.ModernBertConfig(**{**ENCODER, **wider, **wide, **changes}))


def _llama(**changes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**DECODER, **changes}))


def _qwen3(**changes):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**DECODER, **changes}))


def _gpt2(**changes):
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 97}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**shape, **COMMON, **changes}))


def _vit(**changes):
    shape = {**SHAPE, "initializer_range": 0.4, "image_size": 28, "patch_size": 4}  # 49 patches and a [CLS]
    return transformers.ViTModel(transformers.ViTConfig(**{**shape, **changes}))


def _bart(**changes):
    shape = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 97}
    start = {"decoder_start_token_id": SEP, "forced_eos_token_id": None, "init_std": 0.4}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**{**IDS, **shape, **heads, **start, **changes})
    )


FAMILIES = {
    "bert": _bert,
    "roberta": _roberta,
    "distilbert": _distilbert,
    "electra": _electra,
    "modernbert": _modernbert,
    "llama": _llama,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "vit": _vit,
    "bart": _bart,
}
DECODERS = ("llama", "qwen3", "gpt2")


def tiny(family, seed=1, dtype=torch.float64, **changes):
    """Build a random model in float64, in evaluation mode."""
    torch.manual_seed(seed)
    return FAMILIES[family](**changes).to(dtype).eval()


def random_ids(lengths=LENGTHS, seed=2, side="right"):
    """Return padded ids and their mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        filled = slice(0, length) if side == "right" else slice(width - length, width)
        ids[row, filled] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        mask[row, filled] = 1
    return ids, mask


def inputs_of(family, seed=2):
    """Return arguments for a forward pass, and a mask of the outputs to compare."""
    if family == "vit":
        pictures = torch.randn(2, 3, 28, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return {"pixel_values": pictures}, torch.ones(2, 50, dtype=torch.bool)
    ids, mask = random_ids(seed=seed)
    return {"input_ids": ids, "attention_mask": mask}, mask.bool()


@torch.no_grad()
def run(model, **inputs):
    """Return the first output of the model, `[batch, tokens, …]`."""
    return model(**inputs)[0]


def stepwise(model, ids, mask, steps):
    """Generate greedily with a whole pass for each token. Return the ids and the logits of each step."""
    logits = []
    for _ in range(steps):
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)
        logits.append(run(model, input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=False)[:, -1])
        ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return ids, torch.stack(logits)


def attend_layer(settings, q, k, v, sequences, number=0, **options):
    """Return the output of one converted layer, which uses trees even for short sequences."""
    return attend_tree(LayerPlan(number, settings), Call(None, q, k, v, **options), sequences)


WORDS = ["the", "cat", "sat", "on", "mat", "a", "dog", "ran", ".", ",", "The", "A", "Mr", "it", "was", "here", "!", "?"]


def word_tokenizer():
    """Build a tokenizer of whole words between [CLS] and [SEP]."""
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    names = [*special.values(), *WORDS]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def byte_tokenizer(lines):
    """Build a byte-level BPE tokenizer, like that of GPT-2. A token may contain a space, or a part of a letter."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
