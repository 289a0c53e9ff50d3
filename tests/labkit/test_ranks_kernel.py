"""From where it is really used: a Jupyter kernel, a script, Ctrl-C, SIGKILL. Looks at the real process table."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid

import psutil
import pytest

jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ranks need fork")
MARK = "LABKIT_TEST_MARK"

DEFINITIONS = """
import time, os, signal, subprocess
import torch, torch.distributed as dist
from labkit import run_ranks

class Pair:
    def __init__(self, value): self.value = value

class MyError(Exception):
    def __init__(self, rank, why):
        super().__init__(why); self.rank = rank

scale = 10

def work(n):
    got = [None] * dist.get_world_size()
    dist.all_gather_object(got, Pair(dist.get_rank() * scale))
    print("printed by", dist.get_rank())
    return [pair.value + n for pair in got], Pair(n)

def fails():
    if dist.get_rank() == 1:
        raise MyError(1, "my own")
    dist.barrier()

def hangs():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    while True:
        time.sleep(1)
"""


def marked(mark: str) -> list[psutil.Process]:
    """Every live process that was started, at whatever remove, with this mark in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def commands(mark: str, word: str) -> list[int]:
    """Process ids of those whose command line has the word."""
    found = []
    for process in marked(mark):
        try:
            if word in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


class Kernel:
    def __init__(self, mark: str, folder) -> None:
        self.mark = mark
        self.manager = jupyter_client.KernelManager(kernel_name="python3")
        # The interpreter of these tests, whatever kernelspecs are installed.
        self.manager.kernel_spec.argv[0] = sys.executable
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.manager.start_kernel(env={**os.environ, MARK: mark, "PYTHONPATH": path}, cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str, timeout: float = 60, on_start=None) -> tuple[str, str, str]:
        """(status, text of output and results, traceback) of one cell."""
        message = self.client.execute(textwrap.dedent(code))
        text, trace, status = "", "", "ok"
        end = time.monotonic() + timeout
        if on_start:
            on_start()
        while time.monotonic() < end:
            reply = self.client.get_iopub_msg(timeout=timeout)
            if reply["parent_header"].get("msg_id") != message:
                continue
            content = reply["content"]
            if reply["msg_type"] == "stream":
                text += content["text"]
            elif reply["msg_type"] == "execute_result":
                text += content["data"]["text/plain"]
            elif reply["msg_type"] == "error":
                status, trace = content["ename"], "\n".join(content["traceback"])
            elif reply["msg_type"] == "status" and content["execution_state"] == "idle":
                return status, text, trace
        raise TimeoutError(code)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    kernel = Kernel(uuid.uuid4().hex, tmp_path_factory.mktemp("kernel"))
    kernel.run(DEFINITIONS)
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


def test_functions_and_classes_of_cells_travel_there_and_back(kernel):
    status, text, trace = kernel.run("""
        result = run_ranks(work, 3, 5)
        print(result.values[2][0], all(isinstance(value[1], Pair) for value in result.values), result.outputs[1])
    """)
    assert (status, text) == ("ok", "[5, 15, 25] True printed by 1\n\n"), trace


def test_a_cells_exception_is_caught_as_itself_and_shows_the_line(kernel):
    status, text, _ = kernel.run("""
        try:
            run_ranks(fails, 2)
        except MyError as error:
            print(type(error) is MyError, error.rank, error)
            print(error.__notes__[0])
    """)
    assert status == "ok" and text.startswith("True 1 my own\nOn rank 1 of 2:")
    assert "Cell In[" in text and 'raise MyError(1, "my own")' in text
    status, _, trace = kernel.run("run_ranks(fails, 2)")
    assert status == "MyError" and "On rank 1 of 2" in trace


def test_a_widget_and_the_shell_are_refused_by_name(kernel):
    pytest.importorskip("ipywidgets")
    status, _, trace = kernel.run("""
        import ipywidgets
        slider = ipywidgets.IntSlider()
        def uses_slider():
            return slider.value
        run_ranks(uses_slider, 2)
    """)
    assert status == "CargoError" and "`uses_slider` uses the global `slider` (ipywidgets IntSlider)" in trace


def test_interrupting_the_kernel_leaves_no_rank(kernel):
    kernel.run("run_ranks(work, 2, 0)")

    def interrupt():
        assert wait_until(lambda: len(commands(kernel.mark, "sleep 300")) == 2, 30)
        kernel.manager.interrupt_kernel()

    status, _, _ = kernel.run("run_ranks(hangs, 2, timeout=60)", on_start=interrupt)
    assert status == "KeyboardInterrupt"
    assert wait_until(lambda: len(commands(kernel.mark, "ranks.server")) == 1, 5)  # the warm server alone
    assert not commands(kernel.mark, "sleep 300")
    assert kernel.run("print(run_ranks(work, 2, 0).values[0][0])")[:2] == ("ok", "[0, 10]\n")


def test_nothing_of_a_rank_reaches_the_cell(kernel):
    status, text, trace = kernel.run("""
        def noisy():
            import sys
            print("to stdout"); print("to stderr", file=sys.stderr); os.system("echo from the shell 1>&2")
        run_ranks(noisy, 2).outputs == ["to stdout\\nto stderr\\nfrom the shell\\n"] * 2
    """)
    assert (status, text) == ("ok", "True"), trace


@pytest.mark.parametrize("how", ["restart", "SIGKILL"])
def test_a_restarted_or_killed_kernel_leaves_nothing(kernel, how):
    """Last of the kernel's tests: it ends with the kernel dead."""
    kernel.run(DEFINITIONS)
    kernel.client.execute("run_ranks(hangs, 2, timeout=60)")
    assert wait_until(lambda: len(commands(kernel.mark, "sleep 300")) == 2, 30)
    (pid,) = commands(kernel.mark, "ipykernel")
    before = {process.pid for process in marked(kernel.mark)}
    assert len(before) >= 6  # kernel, server, supervisor, ranks, their children
    if how == "SIGKILL":
        os.kill(pid, signal.SIGKILL)
    else:
        kernel.manager.restart_kernel(now=True)
    assert wait_until(lambda: not {process.pid for process in marked(kernel.mark)} & before, 5)
    if how == "restart":
        kernel.client.wait_for_ready(timeout=60)


SCRIPT = """
import sys, time
from labkit.ranks import launch, warm_up
if sys.argv[1] == "hang":
    launch(b"", world_size=2, entry="tests.labkit.ranks_entries:stubborn", timeout=60, init_process_group=False)
warm_up()
print("ready", flush=True)
time.sleep(60 if sys.argv[1] == "stay" else 0)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    mark = uuid.uuid4().hex
    search = os.pathsep.join([os.getcwd(), *(entry for entry in sys.path if entry)])
    started = []

    def start(*words):
        process = subprocess.Popen(
            [sys.executable, str(path), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env={**os.environ, MARK: mark, "PYTHONPATH": search},
        )
        started.append(process)
        return process

    yield start, mark
    for process in started:
        process.kill()
        process.communicate()
    assert wait_until(lambda: not marked(mark), 5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_script_that_is_ended_takes_its_ranks_along(script, number):
    start, mark = script
    process = start("hang")
    assert wait_until(lambda: len(commands(mark, "sleep 60")) == 2, 30)
    process.send_signal(number)
    process.wait(5)
    assert wait_until(lambda: not marked(mark), 5)


def test_a_server_that_is_still_importing_goes_with_its_caller(script):
    start, mark = script
    process = start("stay")
    assert process.stdout.readline() == "ready\n"
    assert wait_until(lambda: len(marked(mark)) >= 2, 5)
    process.kill()
    process.wait(5)
    assert wait_until(lambda: not marked(mark), 5)


def test_a_script_that_ends_by_itself_ends_the_server(script):
    start, mark = script
    process = start("leave")
    assert process.stdout.readline() == "ready\n"
    assert process.wait(30) == 0
    assert wait_until(lambda: not marked(mark), 5)
