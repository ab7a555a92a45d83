"""What a function makes of numbers alone, by its source."""

from __future__ import annotations

import pytest

from keepbusy.fixes.source.constants import ConstantsAtLine, constants_at

NEGATIVES = """\
def info_nce(features, device):
    labels = torch.cat([torch.arange(8) for _ in range(2)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    labels = labels.to(device)
    similar = features @ features.T
    mask = torch.eye(labels.shape[0], dtype=torch.bool).to(device)
    labels = labels[~mask].view(labels.shape[0], -1)
    similar = similar[~mask].view(
        similar.shape[0], -1
    )
    return similar[labels.bool()], similar[features > 0]
"""


def test_masks_made_of_numbers_are_followed_through_their_names() -> None:
    found = constants_at(NEGATIVES)
    assert {line: constant for line, (constant, other) in found.items() if not other} == {
        4: 1, 6: 1, 7: 1, 8: 1, 9: 1,
    }  # fmt: skip
    assert found[11] == ConstantsAtLine(1, 1)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("y = x[torch.arange(len(x)), labels]", ConstantsAtLine(1, 1)),
        ("y = x[torch.arange(len(x), device=x.device)]", ConstantsAtLine(1, 0)),
        ("y = x * torch.tensor([1.0, 2.0], device=x.device)", ConstantsAtLine(1, 0)),
        ("y = x * torch.full((3,), 2.0).to(x.device)", ConstantsAtLine(1, 0)),
        ("y = x * torch.tensor(scale, device=x.device)", None),
        ("y = x[torch.randperm(len(x))]", None),
        ("y = x[0].item()", None),
        ("y = x[torch.ones(3) > threshold]", None),
        ("y = x[F.one_hot(torch.arange(3)).bool()]", ConstantsAtLine(2, 0)),  # how many there are is read, too
        ("y = torch.zeros(3).to(x.device).bernoulli_()[0]", ConstantsAtLine(1, 0)),
        ("y = x.to(torch.float32)", None),
        ("kept = torch.ones(3); kept = x; y = kept.cuda()", None),
        ("for kept in x: kept.cuda()", None),
        ("y = x[before]", None),
        ("kept = torch.zeros(3); kept[labels] = 1; y = x[kept.bool()]", None),
        ("kept = torch.zeros(3); kept.scatter_(0, labels, 1); y = x[kept.bool()]", None),
        ("kept = torch.zeros(3); kept.fill_(1); y = x[kept.bool()]", ConstantsAtLine(1, 0)),
    ],
)
def test_what_is_sent_read_or_chosen_by_is_a_constant_or_not(line: str, found: ConstantsAtLine | None) -> None:
    source = f"before = torch.eye(3).bool()\nfor x, labels in batches:\n    {line}\n"
    assert constants_at(source).get(3) == found


MINIBATCHES = """\
import torch
order = np.arange(128)
for start in range(0, 128, 32):
    chosen, other = order[start : start + 32], batches[start]
    part = order[start : start + 32]
    loss = model(x[part]) - y[other]
"""


def test_the_indices_of_a_minibatch_are_sent_over_once() -> None:
    assert constants_at(MINIBATCHES) == {6: ConstantsAtLine(1, 1)}
    assert constants_at(MINIBATCHES.replace("np.arange(128)", "batches")) == {}
    for line in ("part = batches[0]", "print(part)"):
        assert constants_at(f"{MINIBATCHES}    {line}\n") == {}


def test_a_file_that_is_no_python_has_none() -> None:
    assert constants_at("def broken(:") == {}
