#!/bin/sh
# Build the wheel, install it in a fresh environment, and run it outside the repository, as a user would.
# Usage: tools/try_wheel.sh [PYTHON [OPTION OF pip install]...]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-python3}
[ $# -eq 0 ] || shift
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

"$python" -m venv "$place/env"
pip="$place/env/bin/python -m pip --disable-pip-version-check"
$pip wheel --quiet --no-deps --wheel-dir "$place/wheel" "$root"
$pip install --quiet -c "$root/constraints.txt" "$@" "$place"/wheel/fedstill-*.whl

cd "$place"
PATH="$place/env/bin:$PATH"
python -c "import fedstill, pathlib, sys; sys.exit('$place' not in str(pathlib.Path(fedstill.__file__)))"
fedstill --help
fedstill run --set rounds=2 --out run
test -f run/config.toml
