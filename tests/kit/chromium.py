"""A headless Chromium, spoken to over a pipe in its DevTools protocol; no driver is needed."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


def find():
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One browser with one page."""

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        there, self.out = os.pipe()
        self.inn, back = os.pipe()
        # Chromium reads its file descriptor 3 and writes to 4.
        script = f'exec "$@" 3<&{there} 4>&{back}'
        command = ["bash", "-c", script, "bash", find(), *FLAGS]
        command += [f"--user-data-dir={self.profile.name}", "about:blank"]
        self.process = subprocess.Popen(
            command, pass_fds=(there, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(there)
        os.close(back)
        self.rest, self.number, self.session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def _read(self):
        while b"\0" not in self.rest:
            more = os.read(self.inn, 1 << 20)
            assert more, "Chromium ended"
            self.rest += more
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, file, *, width, height=844, dark=False):
        """Load a file and wait for it; the events of the loading are kept."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.events = []
        self.call("Page.navigate", url=Path(file).absolute().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def run(self, script):
        """What a JavaScript expression evaluates to."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, file, *, full=True):
        image = self.call("Page.captureScreenshot", captureBeyondViewport=full, **self._clip(full))
        Path(file).write_bytes(base64.b64decode(image["data"]))

    def _clip(self, full):
        if not full:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {**size, "scale": 1}}

    def requests(self):
        """The addresses asked for since the last page was opened."""
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self):
        """Errors and warnings of the console."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event for event in self.events if event.get("method") in kinds]

    def close(self):
        os.close(self.out)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.inn)
        self.profile.cleanup()
