"""Attention flow between a context and a question (BiDAF: Seo et al. 2016, arXiv:1611.01603)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hsa.attention.checks import check_count
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy
from hsa.tree.padding import Padding


class AttentionFlow(nn.Module):
    """Attention between a context and a question in both directions.

    For context vectors h_t and question vectors u_j of one example, with a learned w of three parts,

        S_tj = w·[h_t; u_j; h_t∘u_j]
        ũ_t  = Σ_j softmax over j of S_tj · u_j                   from context to question
        h̃    = Σ_t softmax over t of (max over j of S_tj) · h_t   from question to context
        out_t = [h_t; ũ_t; h_t∘ũ_t; h_t∘h̃]

    The similarity is trilinear in w, h and u. Only the length of each example matters, not its tree.

    Args:
        width: Width of the vectors of contexts and questions.

    >>> flow = AttentionFlow(6)
    >>> contexts, questions = Hierarchy.flat([5, 9]), Hierarchy.flat([3, 2])
    >>> flow(torch.randn(14, 6), torch.randn(5, 6), contexts, questions).shape
    torch.Size([14, 24])
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = check_count("width", width, "1 or more channels", minimum=1)
        self.of_context, self.of_question, self.of_both = (nn.Parameter(torch.empty(width)) for _ in range(3))
        self.initialise()

    def initialise(self) -> None:
        """Initialise as a linear layer from the three parts to one number."""
        for part in self.parameters():
            nn.init.uniform_(part, -((3 * self.width) ** -0.5), (3 * self.width) ** -0.5)

    def forward(
        self,
        context: Float[Tensor, "context_leaves width"],
        question: Float[Tensor, "question_leaves width"],
        contexts: Hierarchy,
        questions: Hierarchy,
    ) -> Float[Tensor, "context_leaves four_width"]:
        """Return a vector per context leaf, `[context leaves, 4·width]`.

        Args:
            context: Vectors of all contexts, one after another.
            question: Vectors of all questions, one after another.
            contexts: Forest of the contexts' leaves.
            questions: Forest of the questions' leaves. Its tree t is the question about context t.

        Raises:
            InvalidInput: If vectors do not match their forest or `width`, or the numbers of contexts and questions differ.
        """
        self._check(context, question, contexts, questions)
        in_context, in_question = _padding(contexts), _padding(questions)
        h, u = _unpack(context, in_context), _unpack(question, in_question)
        own = (h @ self.of_context)[:, :, None] + (u @ self.of_question)[:, None]
        similarity = own + (h * self.of_both) @ u.transpose(1, 2)  # [examples, context, question]
        similarity = similarity.to(torch.promote_types(h.dtype, torch.float32))
        similarity = similarity.masked_fill(~in_question.mask[:, None], -math.inf)
        to_question = similarity.softmax(-1).to(u.dtype) @ u
        best = similarity.amax(-1) if similarity.shape[-1] else similarity.sum(-1)
        to_context = best.masked_fill(~in_context.mask, -math.inf).softmax(-1).to(h.dtype)[:, None] @ h
        return _pack(torch.cat([h, to_question, h * to_question, h * to_context], -1), in_context)

    def _check(self, context: Tensor, question: Tensor, contexts: Hierarchy, questions: Hierarchy) -> None:
        for name, x, forest in (("context", context, contexts), ("question", question, questions)):
            if not isinstance(forest, Hierarchy):
                raise InvalidInput(f"{name}s", got=type(forest).__name__, expected="an hsa.Hierarchy")
            if not isinstance(x, Tensor) or tuple(x.shape) != (forest.num_leaves, self.width):
                raise InvalidInput(
                    name,
                    got=f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__,
                    expected=f"[{forest.num_leaves} leaves, {self.width}]",
                    fix="Pass one vector per leaf, packed, without padding",
                )
        if questions.num_trees != contexts.num_trees:
            raise InvalidInput(
                "questions",
                got=f"{questions.num_trees} trees",
                expected=f"{contexts.num_trees}, one per context",
                fix="Pass one question per context",
            )


def _padding(forest: Hierarchy) -> Padding:
    return forest.cached("padding", lambda: Padding(lengths=forest.tensor("leaf_offsets").diff()))


def _unpack(x: Tensor, padding: Padding) -> Tensor:
    """Pad `[leaves, width]` to `[examples, longest, width]`."""
    return padding.unpack(x[:, None]).squeeze(1)


def _pack(x: Tensor, padding: Padding) -> Tensor:
    return padding.pack(x[:, None]).squeeze(1)
