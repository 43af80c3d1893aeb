"""Wait until a server is healthy: python tests/smoke/wait_healthy.py URL PID [SECONDS].

Ends with status 1 when the process dies first or the time is up.
"""

import os
import sys
import time
import urllib.error
import urllib.request


def main() -> int:
    url, pid = sys.argv[1], int(sys.argv[2])
    limit = float(sys.argv[3]) if len(sys.argv) > 3 else 120
    started = time.perf_counter()
    while (waited := time.perf_counter() - started) < limit:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    print(f"healthy after {waited:.1f} s")
                    return 0
        except urllib.error.HTTPError as error:
            error.close()  # 503 with the stage: it is starting
        except OSError:
            pass  # the port is not open yet
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            print("the server ended before it was healthy", file=sys.stderr)
            return 1
        time.sleep(0.1)
    print(f"not healthy after {limit:.0f} s", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
