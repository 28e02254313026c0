#!/usr/bin/env bash
# Builds the wheels and source distributions of both packages and installs each of them into an empty environment of
# every Python named, from the package index and with nothing else in it. Prints a table in Markdown on stdout.
#
#   bench/scripts/clean_install.sh python3.11 python3.12 "chroot /srv/sid python3.14"
#
# SIM=1 also installs fedcohort[sim], and then fedcohort-bench beside it. The index's torch comes with CUDA, 3 GB;
# TORCH=torch==2.13.0+cpu asks for a smaller build. The checks run without a compiler on the PATH.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
builder=${BUILDER:-python3}

"$builder" -m build --quiet --outdir "$work/dist" . >&2
"$builder" -m build --quiet --outdir "$work/dist" bench >&2
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/fedcohort/core/version.py)
wheel=$work/dist/fedcohort-$version-py3-none-any.whl
sdist=$work/dist/fedcohort-$version.tar.gz
bench=$work/dist/fedcohort_bench-$version-py3-none-any.whl

# What a machine without a compiler has on its PATH.
mkdir "$work/bin"
for tool in bash sh env uname ldconfig rm mkdir cat; do ln -s "$(command -v $tool)" "$work/bin/$tool"; done

# row PYTHON WHAT REQUIREMENTS... -- CHECK...
row() {
  local python=$1 what=$2 root= requirements=()
  shift 2
  while [ "$1" != -- ]; do requirements+=("$1"); shift; done
  shift
  local inside=("$python")
  if [[ $python == chroot\ * ]]; then  # another system: give it the files, and run there
    read -r _ root python <<< "$python"
    inside=(chroot "$root" "$python")
    mkdir -p "$root$work"
    cp -r "$work/dist" "$root$work/"
  fi
  local env=$work/env begun=$SECONDS run=()
  [ -z "$root" ] || run=(chroot "$root")
  if [ "$what" != fedcohort-bench ]; then  # which is added to fedcohort[sim]
    rm -rf "$root$env"
    "${inside[@]}" -m venv "$env" >&2
  fi
  "${run[@]}" "$env/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check "${requirements[@]}" >&2
  local took=$((SECONDS - begun)) number size
  number=$("${run[@]}" "$env/bin/python" -m pip list --format freeze | grep -cv '^pip==')
  size=$(du -sm "$root$env" | cut -f1)
  local checked
  checked=$(cd "$root$work" && "${run[@]}" env PATH="$env/bin:$work/bin" HOME="$work" "$env/bin/$1" "${@:2}" 2>&1 | tail -n 1) \
    || checked="FAILED: $checked"
  echo "| $("${inside[@]}" -c 'import platform; print(platform.python_version())') | $what | $took | $number | $size | $checked |"
  [[ $checked != FAILED* ]]
}

cpu='import time; b = time.process_time(); import fedcohort; print(f"import: {time.process_time() - b:.2f} s of processor time")'
echo "| Python | installed | seconds | packages | MB | checked |"
echo "|---|---|---|---|---|---|"
for python in "$@"; do
  row "$python" "wheel" "$wheel" -- python -c "$cpu"
  row "$python" "sdist" "$sdist" -- fedcohort check uniform
  if [ -n "${SIM:-}" ]; then
    row "$python" "fedcohort[sim]" "$wheel[sim]" ${TORCH:-} -- fedcohort compare -q --data synthetic --rounds 3 --seeds 1
    row "$python" "fedcohort-bench" "$bench" "$wheel" ${TORCH:-} -- fedcohort bench --help
  fi
  [[ $python != chroot\ * ]] || rm -rf "$(cut -d" " -f2 <<< "$python")$work"
done
