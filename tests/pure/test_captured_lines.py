"""Statements that become a captured function: what is written, and what is left alone."""

from __future__ import annotations

from textwrap import dedent

import pytest

pytest.importorskip("libcst")

from keepbusy.fixes.definition import CapturedLines
from keepbusy.fixes.source.captured_lines import refused_lines
from keepbusy.fixes.source.rewriting import edited, reached_lines, with_graphs


def captured(source: str) -> str | None:
    """The source with lines captured that end in `# N launches`; at those that end in `# stays` something has to stay,
    and the loop of `# loop` is the one that is explained."""
    lines = [*enumerate(dedent(source).splitlines(), 1)]
    marked = {mark: [at for at, line in lines if line.endswith(mark)] for mark in ("# launches", "# stays", "# loop")}
    launching = tuple((at, 9) for at in marked["# launches"])
    told = CapturedLines("train.py", "train", launching, tuple(marked["# stays"]))
    new = edited(dedent(source), "graph", [], told, marked["# loop"])
    if new is None:
        return None
    compile(new, "train.py", "exec")
    return new.replace("  # launches", "").replace("  # stays", "").replace("  # loop", "")


def test_what_a_loop_computes_becomes_a_function() -> None:
    assert captured("""\
        import keepbusy

        def main(loader, model, optimizer, criterion):
            total = 0.0
            for epoch in range(3):
                for x, y in loader:  # loop
                    x, y = x.cuda(), y.cuda()  # stays
                    # forward
                    out = model(x)  # launches
                    loss = criterion(out, y)  # launches
                    optimizer.zero_grad()
                    loss.backward()  # launches
                    total += loss.item() * len(x)  # stays
                    optimizer.step()  # launches
            return total
    """) == dedent("""\
        import keepbusy


        @keepbusy.graph
        def captured_main(model, optimizer, criterion, x, y):
            out = model(x)
            loss = criterion(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss


        def main(loader, model, optimizer, criterion):
            total = 0.0
            for epoch in range(3):
                for x, y in loader:
                    x, y = x.cuda(), y.cuda()
                    # forward
                    loss = captured_main(model, optimizer, criterion, x, y)
                    total += loss.item() * len(x)
            return total
    """)


def script_asking(value: str) -> str:
    return f"""\
        import keepbusy
        step, hidden = 0, torch.zeros(3)
        while step < 9:  # loop
            x = batches.next()  # stays
            hidden = hidden * 2  # launches
            loss = (model(x) + hidden).sum()  # launches
            print(step, {value})  # stays
            step += 1
    """


def test_what_is_read_behind_a_block_is_returned_however_many_statements_stand_on_a_line() -> None:
    new = captured("""\
        def rollout(agent, seen, values, actions, envs):
            for step in range(32):
                seen[step] = 0; values[step] = 1
                with torch.no_grad():
                    action, value = agent(seen)  # launches
                    values[step] = envs.look(value)  # stays
                actions[step] = action; envs.step(action.item())  # stays
    """)
    assert new is not None
    assert "action, value = captured_rollout(agent, seen)\n" in new
    assert "return action, value\n" in new


MINIBATCHES = """\
    import numpy as np
    import torch

    def update(agent, seen, optimizer):
        order = np.random.permutation(128)
        for begin in range(0, 128, 32):  # loop
            chosen = order[begin : begin + 32]
            loss = agent(seen[chosen]).mean()  # launches
            optimizer.zero_grad()
            loss.backward()  # launches
            optimizer.step()  # launches
    """


def test_a_graph_takes_the_indices_of_a_minibatch_as_a_tensor() -> None:
    new = captured(MINIBATCHES)
    assert new is not None
    assert "def captured_update(agent, seen, optimizer, chosen):\n    loss = agent(seen[chosen]).mean()" in new
    assert "captured_update(agent, seen, optimizer, torch.as_tensor(chosen))" in new
    otherwise = captured(MINIBATCHES.replace("seen[chosen]", "seen[chosen] * chosen[0]"))
    assert otherwise is not None
    assert "captured_update(agent, seen, optimizer, chosen)" in otherwise


def test_a_script_hands_over_what_changes_and_a_method_its_object() -> None:
    script = captured(script_asking("loss.item()"))
    assert script is not None
    assert "def captured_step(hidden, x):\n" in script
    assert "    return hidden, loss.detach()\n" in script
    assert "    hidden, loss = captured_step(hidden, x)\n    print(step, loss.item())" in script
    assert script == captured(script_asking("loss.data.item()")).replace("loss.data.item()", "loss.item()")
    assert "    return hidden, loss\n" in captured(script_asking("loss.data"))  # which may be kept, or be no tensor's
    method = captured("""\
        import keepbusy
        class Agent:
            def update(self, x, n):
                with torch.no_grad():
                    y = self.target(x)  # launches
                self.step_of(y)  # launches
                if n % 2 == 0:
                    soft_update(self.target, self.model)  # launches
                return y.item()
    """)
    assert method is not None
    assert "def captured_update(self, x):\n    with torch.no_grad():\n        y = self.target(x)\n" in method
    assert (
        "        y = captured_update(self, x)\n        if n % 2 == 0:\n            captured_update_2(self)\n" in method
    )


def test_a_batch_that_arrives_in_between_is_taken_before() -> None:
    new = captured("""\
        import keepbusy
        def train(model, loader):
            for x, y in loader:  # loop
                out = model(x)  # launches
                y = y.cuda()  # stays
                loss = out.sub(y)  # launches
                loss.backward()  # launches
    """)
    assert new is not None
    assert "        y = y.cuda()\n        captured_train(model, x, y)\n" in new


BODY = """\
    import keepbusy
    def train(model, optimizer, loader):
        for step, (x, y) in enumerate(loader):  # loop
            out = model(x)  # launches
            ...  # stays
            loss = out.sum()  # launches
            loss.backward()  # launches
            optimizer.step()  # launches
"""


@pytest.mark.parametrize(
    "between",
    [
        "if out.max() > 9: continue",  # the rest may not happen
        "model.rate = out.mean()",  # what it writes to is read further on
        "out = out.cpu()",
        "model.check()",
    ],
)
def test_what_cannot_move_parts_the_graph(between: str) -> None:
    source = BODY.replace("...", between).replace("loss = out.sum()", "loss = (out + model.bias).sum()")
    new = captured(source.replace("loss.backward()", "losses[0] = loss"))
    assert new is not None
    assert "def captured_train(model, x):\n    out = model(x)\n    return out\n" in new
    assert f"            {between}\n        loss = captured_train_2(" in new or f"{between}\n" in new


@pytest.mark.parametrize(
    "line",
    [
        "loss = model(x * step)",  # a number that counts
        "return model(x)",
        "self.loss = self.losses(model(x))",  # a method may look at it
        "self.loss = model(x, self)",
        "super().step(x)",
        "yield model(x)",
        "loss = [model(one) for one in (yield)]",
        "if step: loss = model(x)",
    ],
)
def test_lines_that_are_left_alone(line: str) -> None:
    source = f"""\
        import keepbusy
        def train(self, model, loader):
            for step, x in enumerate(loader):  # loop
                {line}  # launches
    """
    assert captured(source) is None


def test_a_decision_by_a_number_is_not_captured_with_what_it_decides() -> None:
    new = captured("""\
        import keepbusy
        def train(model, loader, warm):
            for step, x in enumerate(loader):  # loop
                loss = model(x)  # launches
                if warm:
                    loss = loss * 2  # launches
                if step > 100:
                    loss = loss * 3  # launches
    """)
    assert new is not None
    assert "def captured_train(model, warm, x):\n    loss = model(x)\n    if warm:\n        loss = loss * 2\n" in new
    assert "        if step > 100:\n            captured_train_2(loss)\n" in new


def test_what_launches_and_has_to_stay_keeps_its_place() -> None:
    """It may draw random numbers, as dropout before and after it does."""
    new = captured("""\
        import keepbusy
        def train(self, model, loader):
            for x in loader:  # loop
                out = model(x)  # launches
                self.noise[0] = torch.randn_like(x)  # launches
                loss = model(out).sum()  # launches
    """)
    assert new is not None
    noise = "self.noise[0] = torch.randn_like(x)"
    assert f"out = captured_train(model, x)\n        {noise}\n        captured_train_2(" in new


def test_lines_that_other_fixes_have_changed_are_no_longer_there() -> None:
    assert edited("def train(x):\n    return x\n", "graph", [], CapturedLines("train.py", "train", (), (1,))) is None


def test_little_is_not_worth_a_graph() -> None:
    told = CapturedLines("train.py", "train", ((3, 2), (4, 3)), ())
    assert edited("def train(x):\n    while x:\n        y = x + 1\n        x = y * 2\n", "graph", [], told) is None


def test_an_attribute_that_the_lines_store_is_returned() -> None:
    """What other code reads of the object after the call is what the replay made."""
    new = captured("""\
        import keepbusy
        class Trainer:
            def __init__(self, model):
                self.model = model
            def train(self, loader):
                for x in loader:  # loop
                    out, self.loss = self.model(x)  # launches
                    self.loss.backward()  # launches
                    self.mean = self.mean * 0.9 + self.loss.detach()  # launches
                    self.log("step")  # stays
    """)
    assert new is not None
    assert "            self.loss, self.mean = captured_train(self, x, self.mean)\n            self.log" in new
    assert (
        "def captured_train(self, x, mean):\n    out, loss = self.model(x)\n    loss.backward()\n"
        "    mean = mean * 0.9 + loss.detach()\n    return loss, mean\n"
    ) in new


def test_the_next_batch_is_taken_behind_the_graph() -> None:
    """By a function of the file, of which is known all that it does."""
    source = """\
        import torch
        import keepbusy

        def get_batch(split):
            data = train_data if split == "train" else val_data
            ix = torch.randint(len(data) - 8, (4,))
            return torch.stack([data[i : i + 8] for i in ix]).to(device)

        def main():
            x = get_batch("train")
            for _ in range(9):  # loop
                loss = model(x)  # launches
                x = get_batch("train")  # stays
                optimizer.zero_grad()
                loss.backward()  # launches
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # launches
                optimizer.step()  # launches
    """
    new = captured(source)
    assert new is not None
    assert (
        """\
def captured_main(x):
    loss = model(x)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""
        in new
    )
    assert """\
        captured_main(x)
        x = get_batch("train")
""" in dedent(new)
    begin, end = source.index("        def get_batch"), source.index("        def main")
    inner = "".join(f"    {line}\n" if line else "\n" for line in source[begin:end].splitlines())
    of_main = captured(source[:begin] + source[end:].replace("        def main():\n", f"        def main():\n{inner}"))
    assert of_main is not None
    assert "        captured_main(x)\n        x = get_batch" in of_main  # as one that only `main` can call
    for act in ("launch(ix)", "global device", "train_data.roll_(1)"):
        kept = captured(source.replace("            ix = torch", f"            {act}\n            ix = torch"))
        assert kept is None or "    loss = model(x)\n    optimizer.zero_grad()" not in kept


def test_a_forward_pass_is_not_captured_without_its_backward_pass() -> None:
    source = """\
        import keepbusy

        def main(loader, model, optimizer):
            for x in loader:  # loop
                out = model(x)  # launches
                loss = out.mean()
                optimizer.zero_grad()
                loss.backward()  # stays
                optimizer.step()  # launches
    """
    new = captured(source)
    assert new is not None
    assert "        out = model(x)\n        loss = out.mean()" in new
    seen = captured(source.replace("loss = out.mean()", "loss = head((out + 1).detach())"))
    assert seen is not None
    assert "def captured_main(model, x):\n    out = model(x)\n    return out" in seen


def test_numbers_are_computed_in_front_of_the_graph() -> None:
    new = captured("""\
        import math
        import keepbusy

        def train(model, optimizer, x, epoch):
            out = model(x)  # launches
            weight = min(1.0, epoch / 100) * math.cos(epoch)
            half = out.shape[0] // 2
            loss = out[:half].mean() * weight  # launches
            loss.backward()  # launches
            optimizer.step()  # launches
    """)
    assert new is not None
    assert (
        """\
    weight = min(1.0, epoch / 100) * math.cos(epoch)
    captured_train(model, optimizer, x, weight)
"""
        in new
    )
    assert "    half = out.shape[0] // 2\n    loss" in new


def test_what_is_read_in_between_is_computed_in_the_graph_and_read_behind_it() -> None:
    new = captured("""\
        import keepbusy

        def train(net, other, criterion, optimizer, x, y):
            out = net(x)  # launches
            criterion(out, y).backward()  # launches
            score = out.mean().item()  # stays
            hits += (out.argmax(1) == y).sum().item() / len(y)  # stays
            out = other(x)  # launches
            criterion(out, y).backward()  # launches
            optimizer.step()  # launches
            return score, hits
    """)
    assert new is not None
    assert (
        """\
    out = net(x)
    criterion(out, y).backward()
    score_on_gpu = out.mean()
    hits_on_gpu = (out.argmax(1) == y).sum()
    out = other(x)
    criterion(out, y).backward()
    optimizer.step()
    return score_on_gpu.detach(), hits_on_gpu.detach()
"""
        in new
    )
    assert (
        """\
    score_on_gpu, hits_on_gpu = captured_train(net, other, criterion, optimizer, x, y)
    score = score_on_gpu.item()
    hits += hits_on_gpu.item() / len(y)
    return score, hits
"""
        in new
    )


def test_reads_without_gradients_are_split_as_well() -> None:
    new = captured("""\
        import keepbusy

        def train(net, criterion, optimizer, x, y):
            ratio = net(x)  # launches
            with torch.no_grad():
                far = (ratio - y).abs()  # launches
                fractions.append((far > 0.2).float().mean().item())  # stays
                del fractions[:-9]
            loss = criterion(ratio, y)  # launches
            loss.backward()  # launches
            optimizer.step()  # launches
            return loss.item()
    """)
    assert new is not None
    assert (
        """\
    with torch.no_grad():
        value_on_gpu = (far > 0.2).float().mean()
    loss = criterion(ratio, y)
    loss.backward()
    optimizer.step()
"""
        in new
    )
    assert (
        """\
    with torch.no_grad():
        fractions.append(value_on_gpu.item())
    with torch.no_grad():
        del fractions[:-9]
    return loss.item()
"""
        in new
    )


@pytest.mark.parametrize(
    "line",
    [
        "score = check(out).item()",  # nobody knows what it does beside
        "out = out.mean().item()",  # what follows needs it
        "values = [one.item() for one in out]",
        "score = rewards.mean().item()",  # may be an array of the host
        "score = out.flatten().tolist()",  # may be the same memory
    ],
)
def test_reads_that_are_not_split(line: str) -> None:
    new = captured(f"""\
        import keepbusy

        def train(net, criterion, optimizer, x, y):
            out = net(x)  # launches
            criterion(out, y).backward()  # launches
            {line}  # stays
            loss = criterion(net(x), y)  # launches
            loss.backward()  # launches
    """)
    assert new is not None
    assert "_on_gpu" not in new


def test_a_batch_that_is_copied_in_a_call_is_copied_in_front() -> None:
    source = """\
        import keepbusy

        def train(net, optimizer, batch, y):
            for x in batch:  # loop
                optimizer.zero_grad()
                loss = net(x.to(device), target=y["a"].cuda())
                loss.backward()  # launches
                optimizer.step()  # launches
    """
    told = CapturedLines("train.py", "train", ((6, 40), (7, 40), (8, 9)), (6,))
    new = edited(dedent(source.replace("  # launches", "")), "graph", [], told, [4])
    assert new is not None
    assert (
        """\
        x_on_gpu = x.to(device)
        value_on_gpu = y["a"].cuda()
        captured_train(net, optimizer, x_on_gpu, value_on_gpu)
"""
        in new
    )
    assert (
        """\
    loss = net(x_on_gpu, target=value_on_gpu)
    loss.backward()
    optimizer.step()
"""
        in new
    )


def test_a_number_that_counts_down_is_no_constant_of_a_graph() -> None:
    new = captured("""\
        import keepbusy

        def sample(model, x, betas):
            for i in reversed(range(1000)):  # loop
                eps = model(x)  # launches
                x = x - betas[i] * eps  # launches
            return x
    """)
    assert new is not None
    assert "    eps = model(x)\n    return eps\n" in new


def test_what_no_graph_can_hold_is_known_whoever_writes_it() -> None:
    source = """\
class Average:
    def update(self, kept, model):
        for old, new in zip(kept.parameters(), model.parameters()):
            old.data = 0.9 * old.data + 0.1 * new.data

    def count(self, kept):
        self.counted += 1

def train(model, kept, average, tokens):
    for step in range(9):
        out = model(tokens)
        tokens = torch.cat([tokens, out])
        average.count(kept)
        scaled = out * step
"""
    told = CapturedLines("train.py", "train", tuple((line, 9) for line in (11, 12, 13, 14)), ())
    assert refused_lines(source, told) == {12, 13, 14}
    assert refused_lines("def train(:\n", told) == set()


def with_a_function_that_copies(function: str, call: str, own: str = "") -> str | None:
    """The step of a loop, whose forward pass is in a function that copies what it is given."""
    source = f"""\
import keepbusy

device = torch.device("cuda")

{function}

def train(self, net, optimizer, batches, gpu):
    for x, y in batches:
        loss = {call}
        loss.backward()
        optimizer.step()
{own}"""
    at = source[: source.index("        loss.backward()")].count("\n")
    told = CapturedLines("train.py", "train", tuple((line, 20) for line in (at, at + 1, at + 2)), (at,), (at,))
    return edited(source, "graph", [], told, [at - 1])


WHOLE_BATCH = "def loss_of(net, x, gpu):\n    {0}\n    return net(x)\n"
LOSS_OF = "def loss_of(net, x, y, gpu):\n    x, y = x.to({0}), y.to({0})\n    return net(x, y)\n"


@pytest.mark.parametrize(
    ("before", "reads", "is_captured"),
    [
        ("", "if wide: loss = loss + scale", False),
        ("if wide: scale = net.scale", "if wide: loss = loss + scale", False),
        ("if wide: scale = net.scale", "loss = loss + scale if wide else loss", False),
        ("if wide: scale = net.scale", "loss = loss + scale", True),  # it has no value there, either
        ("if wide: scale = net.scale\n    else: scale = 1.0", "if wide: loss = loss + scale", True),
        ("try: scale = net.scale\n    except AttributeError: scale = 1.0", "if wide: loss = loss + scale", True),
        ("try: scale = net.scale\n    except AttributeError: raise", "if wide: loss = loss + scale", True),
        ("try: scale = net.scale\n    except AttributeError: pass", "if wide: loss = loss + scale", False),
        ("with open(wide) as scale: pass", "if wide: loss = loss + scale", True),
    ],
)
def test_what_may_have_no_value_is_not_handed_over(before: str, reads: str, is_captured: bool) -> None:
    """A branch that is not taken reads no name; a call reads all that it is given."""
    new = captured(f"""\
def train(net, optimizer, batches, wide):
    {before}
    for x in batches:  # loop
        loss = net(x)  # launches
        {reads}  # launches
        loss.backward()  # launches
        optimizer.step()  # launches
        scale = loss
""")
    assert is_captured == (new is not None and "net, optimizer" in new and "scale" in new.partition("def train")[0]), (
        new
    )


def test_a_constant_mask_is_no_wait_in_a_graph() -> None:
    source = """\
mask = load()
for epoch in range(9):
    out = net(x)
    loss = error(out[mask], y[mask])
    loss.backward()
    optimizer.step()
"""
    told = CapturedLines("train.py", "<module>", tuple((line, 9) for line in (3, 4, 5, 6)), (), (), (4,))
    new = edited(source, "graph", [], told, [2])
    assert new is not None
    assert "mask = load()\nmask_indices = mask.nonzero(as_tuple=True)\n" in new
    assert "    loss = error(out[mask_indices], y[mask_indices])\n" in new.partition("for epoch")[0]
    assert reached_lines(source, [], [told], [2]) == [3, 4, 5, 6]


METHOD = """\
class Trainer:
    def loss_of(self, net, x, y):
        x, y = x.to(self.gpu), y.to(self.gpu)
        return net(x, y)
"""


@pytest.mark.parametrize(
    ("function", "call", "copied", "called"),
    [
        (LOSS_OF.format("gpu"), "loss_of(net, x, y, gpu)", "x.to(gpu)", "(net, x_on_gpu, y_on_gpu, gpu)"),
        (LOSS_OF.format("gpu"), "loss_of(net, y=y, gpu=gpu, x=x)", "x.to(gpu)", "y=y_on_gpu, gpu=gpu, x=x_on_gpu"),
        (LOSS_OF.format("device"), "loss_of(net, x, y, gpu).mean()", "x.to(device)", "y_on_gpu, gpu).mean()"),
        (LOSS_OF.format("0, copy=True"), "loss_of(net, x, y, gpu)", "x.to(0, copy=True)", "(net, x_on_gpu"),
        (METHOD, "self.loss_of(net, x, y)", "x.to(self.gpu)", "self.loss_of(net, x_on_gpu, y_on_gpu)"),
        (
            WHOLE_BATCH.format("a, b = (t.to(gpu) for t in x)").replace("net(x)", "net(a, b)"),
            "loss_of(net, x, gpu)",
            "[t.to(gpu) for t in x]",
            "(net, x_on_gpu, gpu)",
        ),
        (
            WHOLE_BATCH.format("x = {name: t.cuda() for name, t in x.items()}"),
            "loss_of(net, x, gpu)",
            "{name: t.cuda() for name, t in x.items()}",
            "(net, x_on_gpu, gpu)",
        ),
    ],
)
def test_what_the_called_function_copies_first_is_copied_in_front(
    function: str, call: str, copied: str, called: str
) -> None:
    new = with_a_function_that_copies(function, call)
    assert new is not None
    assert f"        x_on_gpu = {copied}\n" in new
    assert called in new
    assert "    loss.backward()\n    optimizer.step()\n" in new


def test_lines_that_copy_first_are_found_where_another_fix_has_moved_them() -> None:
    """And they count as held, though another text stands in the graph."""
    source = LOSS_OF.format("'cuda'") + (
        "\ndef train(net, optimizer, batches):\n    for x, y in batches:\n        loss = loss_of(net, x, y, 0)\n"
        "        loss.backward()\n        optimizer.step()\n"
    )
    told = CapturedLines("train.py", "train", ((7, 20), (8, 20), (9, 20)), (7,), (7,))
    new = with_graphs(source, f"import time\n\n{source}", told, [6])
    assert new is not None
    assert "x_on_gpu = x.to('cuda')\n" in new
    assert reached_lines(source, [], [told], [6]) == [7, 8, 9]


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (LOSS_OF.format("where"), "loss_of(net, x, y, gpu)"),  # a name that `train` might store: see below
        (LOSS_OF.format("gpu"), "loss_of(net, *x)"),
        (LOSS_OF.format("gpu"), "loss_of(net, x, y, gpu())"),
        (LOSS_OF.format("gpu").replace("x, y =", "x = x + 1\n    x, y ="), "loss_of(net, x, y, gpu)"),
        (LOSS_OF.format("gpu").replace("    x, y =", "    if x:\n        pass\n    x, y ="), "loss_of(net, x, y, gpu)"),
        (LOSS_OF.format("gpu"), "other.loss_of(net, x, y, gpu)"),
        (WHOLE_BATCH.format("a, b = (t.to(gpu) for t in x)"), "loss_of(net, x, gpu)"),  # the net gets the batch, too
        (WHOLE_BATCH.format("x = [t.to(gpu) for t in x if t]"), "loss_of(net, x, gpu)"),
    ],
)
def test_a_copy_that_may_be_another_in_front_stays(function: str, call: str) -> None:
    new = with_a_function_that_copies(function, call, "\ndef other():\n    where = 1\n")
    assert new is None or "x_on_gpu" not in new


@pytest.mark.parametrize(("options", "is_captured"), [("", False), (", cycle_momentum=False", True)])
def test_an_optimizer_whose_momentum_changes_steps_behind_the_graph(options: str, is_captured: bool) -> None:
    new = captured(f"""\
        import keepbusy

        def train(net, optimizer, x):
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9{options})
            for _ in range(9):  # loop
                loss = net(x)  # launches
                loss.backward()  # launches
                optimizer.step()  # launches
                schedule.step()
    """)
    assert new is not None
    assert ("    loss.backward()\n    optimizer.step()" in new) == is_captured


@pytest.mark.parametrize(
    ("between", "later"),
    [
        ("hist.append(net.scale.item())", "optimizer.step()"),  # is a weight: it is kept as it was
        ("schedule.step()", "optimizer.step()"),
        ("group['lr'] *= 0.9", "optimizer.step()"),
        ("hist.append(loss.item())", "other.mul_(0.5)"),  # may be the same memory
        ("head.rate = loss.item()", "other.add_(head(x))"),
        ("print('half')", "optimizer.step()"),
        ("hist.append(loss.item()); width = 1 / len(log)", "other = net(x) * width"),
    ],
)
def test_what_may_have_another_name_is_not_passed(between: str, later: str) -> None:
    lines = "\n".join(f"            {one}  # stays" for one in between.split("; "))
    new = captured(f"""\
        import keepbusy

        def train(net, optimizer, x, y):
            loss = net(x, y)  # launches
            loss.backward()  # launches
{lines}
            {later}  # launches
            optimizer.step()  # launches
    """)
    assert new is not None
    before, _, after = new.partition("def train(")
    assert f"    loss.backward()\n    {later}" not in before
    assert "on_gpu" in new or between.split("; ", maxsplit=1)[0] in after.partition("captured_train_2")[0]


def test_a_class_of_the_file_may_do_anything() -> None:
    new = captured("""\
        import keepbusy

        class Schedule:
            pass

        def train(net, optimizer, x):
            out = net(x)  # launches
            schedule = Schedule()
            loss = out.mean() * schedule.value  # launches
            loss.backward()  # launches
    """)
    assert new is None or "    schedule = Schedule()\n    loss" not in new.partition("def train(")[0]


@pytest.mark.parametrize(
    ("made", "is_captured"),
    [
        ("out = model(x)", False),  # its gradients would end at the graph
        ("out = model(x).detach()", True),
        ("out = torch.randn(8)", True),
        ("out = x.square()", True),
    ],
)
def test_a_backward_pass_is_not_captured_without_its_forward_pass(made: str, is_captured: bool) -> None:
    new = captured(f"""\
        import torch

        def train(loader, model, optimizer, criterion, log):
            for x, y in loader:  # loop
                {made}  # launches
                rows = chosen(out.tolist())  # stays
                loss = criterion(out, y[rows])  # launches
                loss.backward()  # launches
                optimizer.step()  # launches
    """)
    assert ("    loss.backward()" in (new or "").partition("def train")[0]) == is_captured


@pytest.mark.parametrize(
    ("made", "is_captured"), [("x[torch.randperm(x.size(0)).cuda()]", True), ("model(x)", False), ("twice(x)", False)]
)
def test_a_function_of_the_file_makes_what_the_functions_that_it_calls_make(made: str, is_captured: bool) -> None:
    new = captured(
        f"""\
        import torch

        def twice(x):
            return network(x)

        def mixed(x):
            share = len(x)
            return {made} * share

        def train(loader, model, optimizer, criterion):
            for x, y in loader:  # loop
                rows = mixed(x)  # launches
                flips = chosen(rows.tolist())  # stays
                loss = criterion(rows, y)  # launches
                loss.backward()  # launches
                optimizer.step()  # launches
    """.replace("share = coins(2)", "share = len(x)")
    )
    assert ("    loss.backward()" in (new or "").partition("def train")[0].partition("def captured")[2]) == is_captured


@pytest.mark.parametrize(("view", "is_captured"), [("out[1:].view(-1, 4)", False), ("target.view(out.shape)", True)])
def test_a_view_of_what_goes_back_goes_back(view: str, is_captured: bool) -> None:
    new = captured(f"""\
        import torch

        def train(loader, model, optimizer, criterion):
            for x, target in loader:  # loop
                out = model(x)  # launches
                flips = coins(out.tolist())  # stays
                rows = {view}
                loss = criterion(rows, flips)  # launches
                loss.backward()  # launches
                optimizer.step()  # launches
    """)
    assert ("    loss.backward()" in (new or "").partition("def train")[0]) == is_captured


@pytest.mark.parametrize(
    ("begin", "held"), [("", ["optimizer.step()"]), ("model.train()", ["model.train()", "eval()"])]
)
def test_a_region_leaves_modules_in_the_mode_they_were_in(begin: str, held: list[str]) -> None:
    """One that ends in another mode would be refused when it is replayed."""
    new = captured(f"""\
        import torch

        def train(loader, model, optimizer, criterion):
            for x, y in loader:  # loop
                {begin or "pass"}
                loss = criterion(model(x), y)  # launches
                {"pass" if begin else "rows = chosen(loss.tolist())  # stays"}
                {"loss.backward()  # launches" if begin else "pass"}
                optimizer.step()  # launches
                model.eval()
                out = model(x)  # launches
                print(out.tolist())  # stays
    """)
    lifted = (new or "").partition("def train")[0]
    assert all(line in lifted for line in held), new
    assert ("eval()" in lifted) == bool(begin)


def test_a_position_on_the_gpu_is_no_counter_and_what_grows_stays() -> None:
    """A decoding loop: each replay moves the position, and the text is longer in each iteration."""
    new = captured("""\
        import torch

        def generate(model, tokens, position):
            for _ in range(20):  # loop
                scores = model(tokens[:, -1:], position)  # launches
                token = scores.argmax(-1)  # launches
                position += 1  # launches
                tokens = torch.cat([tokens, token], dim=1)  # launches
            return tokens
    """)
    assert new is not None
    lifted, _, rest = new.partition("def generate")
    assert "    position += 1\n" in lifted
    assert "torch.cat" not in lifted
    assert "        tokens = torch.cat([tokens, token], dim=1)\n" in rest
    assert (
        "torch.cat"
        in str(
            captured("""\
        import torch

        def train(loader, model, optimizer):
            for x, y in loader:  # loop
                both = model(x)  # launches
                both = torch.cat([both, y])  # launches
                both.sum().backward()  # launches
    """)
        ).partition("def train")[0]
    )


@pytest.mark.parametrize(
    ("update", "is_captured"),
    [
        ("self.steps += 1", False),
        ("kept.data = kept.data.lerp(one, 0.1)", True),
    ],
)
def test_a_method_that_does_on_the_host_what_no_replay_does_is_called_outside(update: str, is_captured: bool) -> None:
    new = captured(f"""\
        import torch

        class Average:
            def follow(self, model):
                for kept, one in zip(self.weights, model.parameters()):
                    {update}

        def train(loader, model, optimizer, average):
            for x, y in loader:  # loop
                loss = model(x, y)  # launches
                loss.backward()  # launches
                optimizer.step()  # launches
                average.follow(model)  # launches
    """)
    lifted = (new or "").partition("class Average")[0] + (new or "").partition("def train")[0].rpartition("class")[2]
    assert "optimizer.step()" in lifted
    assert ("average.follow" in lifted) == is_captured


def test_a_schedule_of_the_file_says_nothing_of_the_steps_of_optimizers() -> None:
    new = captured("""\
        import torch

        class Schedule:
            def step(self):
                self.steps += 1

        def train(loader, model, optimizer):
            for x, y in loader:  # loop
                loss = model(x, y)  # launches
                loss.backward()  # launches
                optimizer.step()  # launches
    """)
    assert new is not None
    assert "    optimizer.step()" in new.partition("@keepbusy.graph")[2].partition("def train(")[0]


def test_a_method_called_as_one_of_pytorch_is_told_by_what_holds_its_object() -> None:
    new = captured("""\
        import torch

        class EMA:
            def update(self, model):
                self.updates += 1
                torch._foreach_lerp_(self.weights, [*model.parameters()], min(0.1, 1 / self.updates))

        class Trainer:
            def __init__(self, model):
                self.model, self.scaler = model, torch.amp.GradScaler()
                self.ema = EMA(model)

            def train(self, loader, optimizer):
                for x, y in loader:  # loop
                    loss = self.model(x, y)  # launches
                    self.scaler.scale(loss).backward()  # launches
                    self.scaler.step(optimizer)  # launches
                    self.scaler.update()  # launches
                    self.ema.update(self.model)  # launches
    """)
    lifted = (new or "").partition("@keepbusy.graph")[2].partition("class Trainer")[0]
    assert "scaler.update()" in lifted
    assert "ema.update" not in lifted


@pytest.mark.parametrize(
    ("in_loop", "before", "is_captured"),
    [
        ("model = meta.clone()", "", False),  # as of meta-learning
        ("batch = loader()", "model = meta.clone()", True),
    ],
)
def test_a_function_that_is_given_another_model_each_time_gets_no_graph(
    in_loop: str, before: str, is_captured: bool
) -> None:
    source = f"""\
        import torch

        def learn(model, optimizer, batches):
            for x, y in batches:  # loop
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)  # launches
                loss.backward()  # launches
                optimizer.step()  # launches

        def main(meta, loader, optimizer):
            {before or "pass"}
            for task in range(100):
                {in_loop}
                learn(model, optimizer, loader)
    """
    assert ("@keepbusy.graph" in (captured(source) or "")) == is_captured
    lines = CapturedLines("train.py", "learn", ((6, 4), (7, 20), (8, 9)), ())
    assert refused_lines(dedent(source), lines) == (set() if is_captured else {6, 7, 8})  # by nobody


@pytest.mark.parametrize(("calls", "is_captured"), [("for x in loader: sample(x)", False), ("sample(loader)", True)])
def test_a_function_that_is_made_in_each_call_is_in_no_graph(calls: str, is_captured: bool) -> None:
    new = captured(f"""\
        import torch

        def sample(x):
            def denoise(x):
                return torch.sin(x)
            for step in range(10):  # loop
                slope = denoise(x)  # launches
                x = x + 0.1 * slope  # launches
            return x

        def main(loader):
            {calls}
    """)
    assert ("@keepbusy.graph" in (new or "")) == is_captured


def test_a_method_named_train_is_no_mode() -> None:
    source = """\
        import keepbusy
        def main(policy, replay):
            for step in range(9):  # loop
                policy.train(replay, 256)  # stays
    """
    assert captured(source.replace("# stays", "# launches")) is not None
    both = CapturedLines("train.py", "main", ((4, 9),), (4,))
    assert edited(dedent(source), "graph", [], both, [3]) is None


def test_a_backward_pass_takes_its_forward_pass_along() -> None:
    source = """\
        import keepbusy
        import torch.nn.functional as F
        def main(model, optimizer, loader, writer):
            for step, x in enumerate(loader):  # loop
                out = model(x)  # launches
                loss = F.mse_loss(out, x)  # launches
                if step % 100 == 0:
                    writer.add_scalar("loss", loss, step)  # stays
                    print("steps a second", int(step / (time.time() - begin)))
                optimizer.zero_grad()
                loss.backward()  # launches
                optimizer.step()  # launches
    """
    new = captured(source)
    assert new is not None
    assert "    loss = captured_main(model, optimizer, x)\n        if step % 100 == 0:\n" in new
    assert captured(source.replace("print(", "check(")) is None
    logs = "print(" + '"steps a second"'
    assert logs in source
    launching = captured(source.replace(logs, "print(out.mean())  # launches\n                    " + logs))
    assert launching is not None  # once in a hundred iterations
    assert "    out, loss = captured_main(model, optimizer, x)\n        if step % 100 == 0:\n" in launching
    drawing = captured(source.replace(logs, "print(torch.rand(3))  # launches\n                    " + logs))
    assert "def captured_main(model" not in str(drawing)


def test_clearing_in_either_branch_belongs_to_the_step() -> None:
    new = captured("""\
        import keepbusy
        def main(model, optimizer, loader, settings):
            for x in loader:  # loop
                if settings.fused:
                    optimizer.zero_grad()  # stays
                else:
                    model.zero_grad()
                model(x).sum().backward()  # launches
                optimizer.step()  # launches
    """)
    assert new is not None
    assert "def captured_main(model, optimizer, settings, x):\n    if settings.fused:\n" in new


def test_a_branch_that_raises_defines_nothing() -> None:
    new = captured("""\
        import keepbusy
        def main(model, optimizer, loader, settings):
            for x in loader:  # loop
                if settings.kind == "plain":
                    out = model(x)  # launches
                elif settings.kind == "flat":
                    out = model(x.flatten())
                else:
                    raise ValueError(settings.kind)
                optimizer.zero_grad()
                out.sum().backward()  # launches
                optimizer.step()  # launches
    """)
    assert new is not None
    assert "def captured_main(model, optimizer, settings, x):\n    if settings.kind" in new
    assert "        captured_main(model, optimizer, settings, x)\n" in new


def test_what_is_made_without_gradients_may_be_trained_on_outside() -> None:
    source = """\
        import keepbusy
        def main(target, model, loader):
            for x in loader:  # loop
                with torch.no_grad():
                    aim = target(x)  # launches
                    aim = aim.clamp(0, 1)  # launches
                    check(aim)  # stays
                loss = model(x.to("cuda"), aim)  # stays
                loss.backward()  # stays
    """
    new = captured(source)
    assert new is not None
    assert "def captured_main(target, x):\n    aim = target(x)\n    aim = aim.clamp(0, 1)\n    return aim\n" in new
    assert captured(source.replace("torch.no_grad()", "torch.autocast('cuda')")) is None


def test_a_model_may_have_made_it_in_a_branch_that_is_not_the_last() -> None:
    new = captured("""\
        def train(loader, model, optimizer, criterion, kind):
            model.train()
            for x, y in loader:  # loop
                if kind == "transformer":
                    out = model(x)  # stays
                    out = out.view(-1, 9)
                else:
                    out, hidden = model(x, hidden)
                loss = criterion(out, y)  # launches
                loss.backward()  # launches
                optimizer.step()  # launches
    """)
    assert new is None or "loss.backward()" not in new.partition("def train")[0]


CRITIC = """\
    def step(self, real):
        for p in critic.parameters():
            p.requires_grad = True
        for _ in range(5):
            loss = critic(real).mean()  # launches
            loss.backward()  # launches
        for p in critic.parameters():
            p.requires_grad = False
        generate(critic).backward()  # launches
        return loss.item()  # stays
"""


def test_what_a_loop_makes_has_a_value_where_it_is_read_in_any_case() -> None:
    """Else the program would end with an error, too. Weights are left as they were found."""
    new = captured(CRITIC)
    assert new is not None
    assert dedent(new).endswith("    loss = captured_step(real)\n    return loss.item()\n"), new
    assert captured(CRITIC.replace("return loss.item()", "if real: return loss.item()")) is None


@pytest.mark.parametrize("within", ["", "    for real in batches:\n"])
def test_in_a_loop_it_may_have_the_value_of_the_last_iteration(within: str) -> None:
    body = CRITIC.partition("\n")[2]
    lines = body.splitlines() if not within else [f"    {line}" for line in body.splitlines()]
    source = "def step(self, real, batches):\n" + within + "\n".join(lines) + "\n"
    new = captured(source.replace("return loss.item()", "print(loss.item())"))
    assert (new is None) == bool(within)


@pytest.mark.parametrize(
    ("made", "filled"), [("[0 for _ in range(n + 1)]", "sums[0] += loss"), ("[]", "sums.append(loss)")]
)
def test_a_list_that_a_graph_fills_is_made_in_it(made: str, filled: str) -> None:
    new = captured(f"""\
        def step(net, x, n):
            sums = {made}
            for row in range(n):
                loss = net(x[row])  # launches
                {filled}  # launches
            sums[-1].backward()  # launches
            return [loss.item() for loss in sums]  # stays
    """)
    assert new is not None
    assert f"def captured_step(net, x, n):\n    sums = {made}\n    for row" in new, new
    assert "    sums = captured_step(net, x, n)\n" in new
