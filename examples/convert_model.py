"""Attention over trees in a pre-trained model, without training.

    python examples/convert_model.py [MODEL]

MODEL is an encoder: a folder, or a name on the Hugging Face Hub. Without one, a small BERT with random weights shows
the calls; its similarity then says nothing about quality.
"""

import sys

import torch
import transformers

import hsa.huggingface


def load(name: str | None) -> tuple[transformers.PreTrainedModel, torch.Tensor]:
    """Return a model and a batch of token ids."""
    if name is None:
        config = transformers.BertConfig(
            vocab_size=1000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256
        )
        config.max_position_embeddings = 1024
        return transformers.BertModel(config).eval(), torch.randint(1000, (2, 1024))
    model = transformers.AutoModel.from_pretrained(name).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    text = (torch.__doc__ or "") + "\n" + (transformers.__doc__ or "") + " ".join(dir(torch))
    return model, tokenizer(text, truncation=True, return_tensors="pt").input_ids


@torch.no_grad()
def main(name: str | None = None) -> float:
    torch.manual_seed(0)
    model, ids = load(name)
    exact = model(ids).last_hidden_state

    hsa.huggingface.convert(model, top_k=16)  # every layer; a larger top_k is closer to the original
    with hsa.huggingface.counting() as counted:
        converted = model(ids).last_hidden_state
    similarity = torch.cosine_similarity(exact, converted, dim=-1).mean().item()
    print(f"{ids.shape[1]} tokens, every layer converted")
    print(f"cosine of the outputs:     {similarity:.4f}")
    print(f"operations of attention:   {counted.ratio:.1f} times fewer")

    model.save_pretrained("runs/converted")  # after from_pretrained(…), call convert(model) to apply the saved settings
    hsa.huggingface.revert(model)
    print(
        f"after revert:              {torch.cosine_similarity(exact, model(ids).last_hidden_state, dim=-1).mean():.4f}"
    )
    return similarity


if __name__ == "__main__":
    main(*sys.argv[1:2])
