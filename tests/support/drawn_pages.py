"""Pages as a real browser draws them that can reach nothing: behind a proxy where nobody listens."""

import re
import shutil
import subprocess
from pathlib import Path

from thrifty.reporting.color_theme import DARK, LIGHT

CHROMIUM = shutil.which("chromium")
SCHEMES = {"light": ("1", LIGHT), "dark": ("0", DARK)}
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--proxy-server=127.0.0.1:9"),
    *("--virtual-time-budget=10000", "--dump-dom"),
)


def drawn(page: Path, profile: Path, scheme: str = "light", size: str = "1280,1000") -> str:
    """The page as the browser has it after its scripts ran."""
    assert CHROMIUM is not None
    preference = f"--blink-settings=preferredColorScheme={SCHEMES[scheme][0]}"
    command = [CHROMIUM, *FLAGS, preference, f"--user-data-dir={profile}", f"--window-size={size}", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def probed(page: Path, expression: str, profile: Path) -> Path:
    """A copy of the page that writes the value of a JavaScript expression into its title once the charts are drawn."""
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    probe = f"<script>setTimeout(() => {{ document.title = 'probe:' + ({expression}); }}, 5000)</script></body>"
    copy = profile.with_suffix(".html")
    copy.write_text(probe.join(html.rsplit("</body>", 1)))
    return copy
