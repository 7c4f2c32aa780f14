#!/bin/sh
# Build the wheel, install it in a fresh environment, and run it outside the repository, as a user would.
# The development environment trains on a table and on images and exports a bundle of each. Then runs and data are
# removed, and the fresh environment must predict from the bundles, in another folder, byte for byte the same files.
# Usage: [DEV=PYTHON] tools/try_wheel.sh [PYTHON [OPTION OF pip install]...]
#   DEV: Python of the development environment (default: .venv/bin/python)
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
dev=${DEV:-$root/.venv/bin/python}
python=${1:-python3}
[ $# -eq 0 ] || shift
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

"$python" -m venv "$place/env"
pip="$place/env/bin/python -m pip --disable-pip-version-check"
$pip wheel --quiet --no-deps --wheel-dir "$place/wheel" "$root"
wheel=$(ls "$place"/wheel/fedstill-*.whl)
$pip install --quiet -c "$root/constraints.txt" "$@" "$wheel"

# The development environment: two runs, their bundles, and the answers that are expected.
mkdir "$place/dev" "$place/user"
cd "$place/dev"
"$dev" - <<'END'
import random
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

draw = random.Random(0)
rows = [(draw.choice(["bern", "oslo"]), draw.gauss(50, 9)) for _ in range(400)]
lines = [f"{town},{age:.3f},{'yes' if age + 9 * (town == 'oslo') > 54 else 'no'}" for town, age in rows]
Path("train.csv").write_text("\n".join(["town,age,ill", *lines[:300]]) + "\n")
new = [f"p{row},{line.rpartition(',')[0]}" for row, line in enumerate(lines[300:])]
Path("new.csv").write_text("\n".join(["patient_id,town,age", *new]) + "\n")
digits = load_digits()
for row in range(400):
    folder = Path("train") / str(digits.target[row]) if row < 300 else Path("photos")
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((digits.images[row] * 15).astype("uint8")).save(folder / f"{row}.png")
END
developed() { PYTHONPATH="$root/src" "$dev" -m fedstill "$@"; }
small="--rounds 10 --quiet --set local.lr=0.2 --set local.batch_size=10 --set partition={scheme=\"iid\",clients=4} --set cohort=2 --set method=fedavg"
developed run $small --set 'data={source="train.csv",label="ill"}' --set 'model={name="mlp",hidden=[8],init="torch"}' --out table
developed run $small --set 'data={source="train"}' --set 'model={name="cnn"}' --out images
for kind in table images; do
    inputs=$([ $kind = table ] && echo new.csv || echo photos)
    developed export $kind --out $kind.safetensors
    developed predict $kind $inputs --out expected-$kind
    mv "$inputs" $kind.safetensors expected-$kind "$place/user"
done
rm -r "$place/dev"

cd "$place/user"
PATH="$place/env/bin:$PATH"
python -c "import fedstill, pathlib, sys; sys.exit('$place/env' not in str(pathlib.Path(fedstill.__file__)))"
fedstill --help
fedstill run --set rounds=2 --out run
test -f run/config.toml

# Without extras, one line names the extra.
for kind in table images; do
    inputs=$([ $kind = table ] && echo new.csv || echo photos)
    code=0
    fedstill predict $kind.safetensors $inputs 2> line || code=$?
    cat line
    test $code -eq 2
    test "$(wc -l < line)" -eq 1
    grep -q "pip install 'fedstill\[data\]'" line
done

# With the extra for data, and without the extra for pictures, the answers are those of the development environment.
$pip install --quiet -c "$root/constraints.txt" "$@" "$wheel[data]"
for kind in table images; do
    inputs=$([ $kind = table ] && echo new.csv || echo photos)
    fedstill predict $kind.safetensors $inputs --out $kind
    cmp $kind/predictions.csv expected-$kind/predictions.csv
    echo "same bytes: $kind/predictions.csv, $(wc -l < $kind/predictions.csv) lines"
done
