"""Ways in which programs import, tried on a shelf without the real torch: as in a plain interpreter, or a restart."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpulaunch.launcher.loop.preload_finder import Package, concerns

PACKAGES = {
    "first/__init__.py": "import second\nfrom . import part\nruns = [1]",
    "first/part.py": "name = 'part'",
    "second/__init__.py": "from . import deep\nvalue = 2",
    "second/deep.py": "value = 3",
    "replaced.py": "import sys\nclass Made: pass\nsys.modules[__name__] = Made()",
    "space/inside/__init__.py": "value = 4",
    "beforetorch.py": "import sys\nif 'torch' in sys.modules: raise ImportError('import beforetorch before torch')",
    "warnsoftorch.py": "import sys\nlate = sys.modules.get('torch') is not None",
    "wants.py": "import warnsoftorch",
    "torch.py": "value = 5",
    "withtorch.py": "import sys\nkernels = 'torch' in sys.modules",
}
SHELF = """
import sys, os, importlib, importlib.util
sys.path.insert(0, {site!r})
from gpulaunch.launcher.loop.import_watch import Watch
from gpulaunch.launcher.loop.preload_finder import PreloadFinder
watch, at_start = Watch(), frozenset(sys.modules)
for name in ("first", "second", "replaced", "space.inside", "beforetorch", "wants", "torch", "withtorch"):
    with watch.importing(name, keeps=True):
        importlib.import_module(name)
prepared = {{name: module for name, module in sys.modules.items() if name not in at_start}}
shelf, restarts = PreloadFinder(watch.packages), []
shelf.fill(at_start)
assert not {{"first", "second", "replaced", "space", "torch"}} & sys.modules.keys()
shelf.arm(os.environ, again=lambda packages, why: restarts.append(why), on_torch=lambda: None)
"""
HEALTHY = {
    "threads that import at the same time": """
        import threading
        sys.setswitchinterval(1e-6)
        wrong, names = [], ["first", "second", "second.deep", "first.part", "space.inside", "replaced"] * 8
        barrier = threading.Barrier(len(names))
        def work(name):
            barrier.wait()
            if importlib.import_module(name) is not prepared[name]:
                wrong.append(name)
        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not wrong, wrong
        """,
    "who asks whether it is installed does not import": """
        from importlib.machinery import SourceFileLoader
        spec = importlib.util.find_spec("first")
        assert "first" not in sys.modules
        assert isinstance(spec.loader, SourceFileLoader) and "import second" in spec.loader.get_source("first")
        assert spec.origin.endswith("first/__init__.py") and spec.submodule_search_locations
        assert importlib.util.find_spec("missing") is None
        """,
    "a lazy loader": """
        spec = importlib.util.find_spec("first")
        lazy = sys.modules["first"] = importlib.util.module_from_spec(spec)
        importlib.util.LazyLoader(spec.loader).exec_module(lazy)
        assert lazy.runs == [1] and type(lazy).__name__ == "module" and sys.modules["second"].value == 2
        """,
    "statements and functions that import": """
        __import__("first", fromlist=["part"])
        from first import part
        from second.deep import value
        import replaced, space.inside
        assert part is prepared["first.part"] and type(replaced).__name__ == "Made" and space.inside.value == 4
        assert sys.modules["first"].__spec__.loader is sys.modules["first"].__loader__
        """,
    "forgotten, imported again; reloaded": """
        import first
        first.runs.append(2)
        assert importlib.reload(first) is first and first.runs == [1]
        del sys.modules["first"]
        import first as another
        assert another is not first and another.__file__ == first.__file__
        """,
    "pickle imports what it needs": """
        import pickle
        assert pickle.loads(b"csecond.deep\\nvalue\\n.") == 3
        """,
    "a finder that forbids a module": """
        class Forbids:
            def find_spec(self, name, path=None, target=None):
                if name == "second": raise ImportError("second is forbidden")
        sys.meta_path.append(Forbids())
        import first
        """,
    "names that the program has changed in the meantime": """
        import unittest.mock
        with unittest.mock.patch.dict(sys.modules, {"second": None}):
            try:
                import second
            except ImportError:
                pass
            else:
                raise AssertionError
        import second
        assert second is prepared["second"]
        """,
    "before torch what looks for it, after it what was found after it": """
        import beforetorch, wants, torch, withtorch
        assert not wants.warnsoftorch.late and withtorch.kernels
        assert torch is prepared["torch"] and beforetorch is prepared["beforetorch"]
        """,
    "torch first, then what does not look for it": "import torch, first\n",
}
RESTARTS = {
    "an import hook, which would see what is imported": """
        class Hook:
            def find_spec(self, name, path=None, target=None): pass
        sys.meta_path.insert(0, Hook())
        import first
        """,
    "a hook for files": """
        sys.path_hooks.insert(0, lambda path: (_ for _ in ()).throw(ImportError))
        import first
        """,
    "a stand-in for what it needs": "sys.modules['second'] = os\nimport first",
    "what it needs is disabled": "sys.modules['second'] = None\nimport first",
    "a stand-in for a part of what it needs": "sys.modules['second.deep'] = os\nimport first",
    "what must come before torch, after it": """
        import torch, beforetorch
        assert restarts == ["beforetorch depends on whether torch is imported before it"]
        """,
    "what looks for torch, needed by another": """
        import torch, wants
        assert restarts == ["warnsoftorch depends on whether torch is imported before it"]
        """,
    "what found torch, before it": """
        import withtorch
        assert restarts == ["withtorch depends on whether torch is imported before it"]
        """,
}


def run(tmp_path: Path, program: str) -> None:
    for path, text in PACKAGES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    text = SHELF.format(site=os.fspath(tmp_path)) + textwrap.dedent(program)
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("program", HEALTHY.values(), ids=HEALTHY)
def test_an_import_is_as_in_a_plain_interpreter(program: str, tmp_path: Path) -> None:
    run(tmp_path, textwrap.dedent(program) + "assert not restarts, restarts")


@pytest.mark.parametrize("program", RESTARTS.values(), ids=RESTARTS)
def test_the_rank_restarts_where_an_import_would_make_something_else(program: str, tmp_path: Path) -> None:
    run(tmp_path, textwrap.dedent(program) + "\nassert len(restarts) >= 1")


READ_IN_C = """
    OMP_NUM_THREADS MKL_NUM_THREADS MKL_DYNAMIC KMP_AFFINITY KMP_BLOCKTIME GOMP_CPU_AFFINITY OPENBLAS_NUM_THREADS
    TORCH_LOGS TORCHINDUCTOR_CACHE_DIR PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF C10_LOG_LEVEL ONEDNN_VERBOSE
    TRITON_CACHE_DIR NCCL_DEBUG NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME UCX_TLS CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING
    CUBLAS_WORKSPACE_CONFIG HSA_OVERRIDE_GFX_VERSION
    """
READ_LATER = "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER TORCH_HOME TORCH_NCCL_BLOCKING_WAIT TORCHELASTIC_RUN_ID"


@pytest.mark.parametrize("variable", READ_IN_C.split())
def test_a_variable_of_torchs_families_concerns_compiled_code_unseen(variable: str) -> None:
    """Which of them torch reads while it is imported is not seen from Python."""
    assert concerns("torch", Package(native=True), variable)
    assert not concerns("pure", Package(), variable)


@pytest.mark.parametrize("variable", [*READ_LATER.split(), "HF_HOME", "WANDB_MODE", "MY_OMP_NUM_THREADS"])
def test_a_variable_that_is_read_later_or_of_no_family_concerns_no_import(variable: str) -> None:
    assert not concerns("torch", Package(native=True), variable)
    assert concerns("torch", Package(native=True, asked={variable}), variable)
