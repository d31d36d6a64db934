"""A run on ranks that differ in data, settings or versions is refused by the same line on each of them."""

import os
import re
from pathlib import Path

import pictures
import PIL
import pytest
import torch
from processes import ranks
from runs import digits

from vitfast.errors import InputError
from vitfast.run.distributed import Ranks, join, leave, run_facts
from vitfast.train import trainer

FILE = r"\('b/1.jpg', 1, \d+\)"
REFUSED_RUNS = [
    "classes; place 2 is 'B' on rank 2 and 'b' on the first rank",
    rf"validation images; place 6 is {FILE} on rank 2 and {FILE} on the first rank",
    "settings; lr is 0.5 on rank 2 and 0.25 on the first rank; log_every is 7 on rank 2 and 8 on the first rank",
    "versions; Pillow is '1.2' on rank 2 and '3.4' on the first rank",
    "step to go on from; it is None on rank 1 and 2 on the first rank",
]
VALUES = [  # what the last rank has, what the others have, and how the error tells them apart
    (["a", "b", "c"], ["a", "c"], "place 2 is 'b' on rank 2 and 'c' on the first rank"),
    (["a", "b"], ["a"], "place 2 is 'b' on rank 2 and missing on the first rank"),
    (["e\u0301\udcff"], ["\u00e9\udcff"], r"place 1 is 'e\u0301\udcff' on rank 2 and '\xe9\udcff' on the first rank"),
    (dict(a=1), dict(a=1.0), "a is 1 on rank 2 and 1.0 on the first rank"),
    ("\u00e9", None, r"it is '\xe9' on rank 2 and None on the first rank"),
]


def config(**fields):
    return digits(**dict(data="same", output="run", img_size=16, batch_size=6, steps=2, workers=0) | fields)


def refused(function, *args) -> None:
    with pytest.raises(InputError) as caught:
        function(*args)
    print(caught.value)


def disagree(root: Path) -> None:
    """All cases on one rank, in a folder of its own as on a machine of its own; the last rank is another."""
    last, trainer.write_report = os.environ["RANK"] == "2", lambda *_: None
    os.chdir(root / os.environ["RANK"])
    if last:
        for split in ("train", "val"):
            os.rename(f"renamed/{split}/b", f"renamed/{split}/B")
        Path("resized/val/b/1.jpg").write_bytes(Path("resized/val/b/1.jpg").read_bytes() + b"\0")
    for data in ("renamed", "resized"):
        refused(trainer.train, config(data=data))
    refused(trainer.train, config(lr=0.5 if last else 0.25, log_every=7 if last else 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PIL, "__version__", "1.2" if last else "3.4")
        refused(trainer.train, config())
    assert not Path("run").exists()
    assert trainer.train(config(output=os.path.abspath("run")))["steps"] == 2
    refused(trainer.train, config(steps=3))  # the checkpoint is on the first rank's machine alone
    sent, gather, (group, _) = [], Ranks.gather, join(torch.device("cpu"))
    Ranks.gather = lambda self, value: sent.append(value) or gather(self, value)
    group.check_same(dict(number=1, value=dict(a=1, b=2) if last else dict(b=2, a=1)))
    assert len(sent) == 1 and all(re.fullmatch("[0-9a-f]{64}", text) for text in sent[0])
    values = [there if last else first for there, first, _ in VALUES]
    for value in values:
        refused(group.check_same, dict(number=1, value=value, rank=last))
    assert sent[2::2] == values  # of the first difference alone, whatever else differs
    leave()


def test_every_rank_refuses_what_is_not_the_same_on_all(tmp_path):
    for rank, name in ((rank, name) for rank in "012" for name in ("renamed", "resized", "same")):
        pictures.folder(tmp_path / rank / name)
    processes = ranks(3, disagree, tmp_path)
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    expected = [*REFUSED_RUNS, *(f"value; {re.escape(told)}" for *_, told in VALUES)]
    for line, text in zip(outputs[0][0].splitlines(), expected, strict=True):
        assert re.fullmatch(f"every rank must have the same {text}", line)
    assert outputs[0][0] == outputs[1][0] == outputs[2][0]


def test_machines_may_have_folders_and_devices_of_their_own():
    other = config(about="text", data="elsewhere", output="there", data_dir="disk", device="cuda:3", workers=5)
    assert run_facts(other) == run_facts(config()) != run_facts(config(eval_every=3))
