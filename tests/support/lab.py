"""A real JupyterLab and a real Chromium: a notebook of given cells is opened, run, looked at and clicked."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import sync_playwright

from support import processes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from playwright.sync_api import Locator, Page

MARK = "NBDDP_TEST_LAB"
START_S = 60.0
ENDING_S = 15.0
ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts"
CHROMIUM_ARGS = [
    "--no-sandbox",  # it needs privileges that containers withhold; only pages of this machine are opened
    "--disable-gpu",
    "--no-first-run",
    # No traffic of the browser's own.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]


def chromium() -> str | None:
    """Return the path of the Chromium to drive: NBDDP_CHROMIUM, or the first of the usual names."""
    names = [os.environ["NBDDP_CHROMIUM"]] if os.environ.get("NBDDP_CHROMIUM") else ["chromium", "chromium-browser", "google-chrome"]
    return next((path for name in names if (path := shutil.which(name))), None)


class LabNotebook:
    """One notebook, open in the browser. ``page`` is playwright's, for what has no method here."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page = page
        self.path = path

    def menu(self, menu: str, entry: str) -> None:
        """Choose an entry of the menu bar by its exact name."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{menu}$")).click()
        self.page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{re.escape(entry)}$")).click()

    def run_all(self) -> None:
        """Run all cells; returns at once."""
        self.menu("Run", "Run All Cells")

    def run_cell(self, index: int) -> None:
        """Run one cell, counted from 0; returns at once."""
        self.page.locator(".jp-Notebook .jp-CodeCell").nth(index).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")

    def theme(self, name: str) -> None:
        """Choose a theme, and wait until it is there."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Settings$")).click()
        self.page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Theme$")).hover()
        self.page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{re.escape(name)}$")).click()
        self.page.locator(f"body[data-jp-theme-name='{name}']").wait_for(state="attached")

    def interrupt(self) -> None:
        """Press the toolbar's Stop button."""
        self.page.locator("[data-command='notebook:interrupt-kernel'], [data-jp-item-name='interrupt']").first.click()

    def output(self, text: str | re.Pattern[str], timeout: float = 60) -> Locator:
        """Wait until an output shows this text; return the first that does."""
        found = self.page.locator(".jp-OutputArea-output", has_text=text).first
        found.wait_for(timeout=timeout * 1000)
        return found

    def idle(self, timeout: float = 60) -> None:
        """Wait until the status bar says that a kernel exists and is idle; the indicator beside the notebook says idle before there is one."""
        self.page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=timeout * 1000)

    def save(self) -> nbformat.NotebookNode:
        """Save the notebook and return what is in the file then."""
        before = self.path.stat().st_mtime_ns
        self.page.keyboard.press("Escape")
        self.menu("File", "Save Notebook")
        deadline = time.monotonic() + 20
        while True:
            if self.path.stat().st_mtime_ns != before:
                with suppress(nbformat.reader.NotJSONError):  # it is being written
                    notebook: nbformat.NotebookNode = nbformat.read(self.path, as_version=4)
                    return notebook
            assert time.monotonic() < deadline, f"{self.path.name} was not written within 20 s of File, Save Notebook"
            self.page.wait_for_timeout(50)

    def screenshot(self, name: str, of: Locator | None = None) -> Path:
        """Write artefacts/NAME.png, of the page or of one element, and return its path."""
        ARTEFACTS.mkdir(exist_ok=True)
        path = ARTEFACTS / f"{name}.png"
        if of is None:
            self.page.screenshot(path=path)
        else:
            of.scroll_into_view_if_needed()
            of.screenshot(path=path)
        return path


class Lab:
    """A JupyterLab server on a folder, and a browser: use `running`."""

    def __init__(self, folder: Path, settings: Path, url: str, token: str, page: Page) -> None:
        self.folder = folder
        self._settings = settings
        self._url = url
        self._token = token
        self._page = page

    def open(self, cells: Sequence[str], name: str = "notebook.ipynb") -> LabNotebook:
        """Write a notebook of these cells, open it and wait for its kernel."""
        kernelspec = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
        notebook = new_notebook(cells=[new_code_cell(source) for source in cells], metadata={"kernelspec": kernelspec})
        nbformat.write(notebook, self.folder / name)
        return self.reopen(name)

    def configure(self, extension: str, plugin: str, **settings: object) -> None:
        """Set what the settings editor would; holds from the next notebook that is opened."""
        path = self._settings / extension / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))

    def reopen(self, name: str = "notebook.ipynb", *, idle: bool = True) -> LabNotebook:
        """Open a notebook of the folder in a fresh workspace, as a new browser tab would; a kernel that it has is kept, and waited for if `idle`."""
        self._page.goto(f"{self._url}/lab/tree/{name}?token={self._token}&reset")
        self._page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        opened = LabNotebook(self._page, self.folder / name)
        if idle:
            opened.idle()
        return opened


@contextmanager
def running(folder: Path, state: Path, env: Mapping[str, str] | None = None) -> Iterator[Lab]:
    """Start JupyterLab on ``folder`` and Chromium; end both, and assert that nothing started below them is left.

    Args:
        folder: where the notebooks are.
        state: settings, workspaces, IPython's own folder and the server's log.
        env: added to this process's environment for the server, and so for its kernels.
    """
    token, mark, port = secrets.token_hex(16), secrets.token_hex(8), _free_port()
    settings = state / "settings"
    news = settings / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text(json.dumps({"fetchNews": "false"}))  # else a pop-up asks, over the notebook
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
        *(f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"),
        *("--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.extension_manager=readonly"),
    ]
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(state / "config"),
        "JUPYTER_RUNTIME_DIR": str(state / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(state / "workspaces"),
        "IPYTHONDIR": str(state / "ipython"),
        **(env or {}),
        MARK: mark,
    }
    log = state / "lab.log"
    with log.open("wb") as stream:
        server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for_server(server, f"{url}/api/status?token={token}", log)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), headless=True, args=CHROMIUM_ARGS)
            try:
                yield Lab(folder, settings, url, token, browser.new_page(viewport={"width": 1100, "height": 900}))
            finally:
                browser.close()
    finally:
        server.terminate()  # it shuts its kernels down first
        try:
            server.wait(ENDING_S)
        finally:
            left = processes.gone(lambda: processes.marked(MARK, mark), ENDING_S)
            listed = processes.describe(left)
            processes.end(left)
            server.wait(ENDING_S)
        assert not left, f"{ENDING_S:.0f} s after JupyterLab's end there were still:\n{listed}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_for_server(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                message = f"JupyterLab did not come up; its log ends:\n{log.read_text(errors='replace')[-4000:]}"
                raise RuntimeError(message) from error
            time.sleep(0.1)
