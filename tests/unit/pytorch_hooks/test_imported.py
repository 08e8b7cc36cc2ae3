"""Functions of torch that scripts and their modules have by name, before ranks are forked and after."""

import subprocess
import sys
import textwrap

import pytest

# `early` is there when ranks are forked, `late` comes with the script, which is another `__main__`.
PROGRAM = """
import sys, types
import torch.distributed as dist

def module(name):
    made = sys.modules[name] = types.ModuleType(name)
    exec("from torch.distributed import init_process_group as begin, get_rank", made.__dict__)
    return made

early = module("early")
if {ahead}:
    from ckptless.pytorch_hooks.torch_private import imported
late = module("late")
script = module("__main__")
stock = [dist.init_process_group, dist.get_rank]
from ckptless.pytorch_hooks.torch_private import asked
asked.answer(lambda: None)
for one in (early, late, script):
    assert one.begin is dist.init_process_group is not stock[0], one.__name__
    assert one.get_rank is stock[1]
# torch's own modules have theirs.
from torch.distributed import c10d_logger, distributed_c10d
assert distributed_c10d.init_process_group is dist.init_process_group
"""


@pytest.mark.parametrize("ahead", [True, False])
def test_whoever_has_them_by_name_has_the_answering_ones(ahead: bool) -> None:
    program = textwrap.dedent(PROGRAM).format(ahead=ahead)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
