#!/usr/bin/env bash
# Puts the site of every tagged version beside the newest one: SITE/0.3.0/ and so on, and SITE/versions.json.
set -euo pipefail
site=$(realpath "$1") bin=$(realpath "$2") names=()
cd "$(dirname "$0")/../.."
for tag in $(git tag --list 'v[0-9]*' --sort=-v:refname); do
  version=${tag#v} copy=$(mktemp -d)
  git archive "$tag" docs src README.md examples bench CHANGELOG.md LICENSE | tar -x -C "$copy"
  # A version's own sources document themselves; only Sphinx and the dependencies are today's.
  if PYTHONPATH=$copy/src:$copy/bench/src "$bin/sphinx-build" -q -j 2 "$copy/docs" "$site/$version"; then
    names+=("\"$version\"")
  else
    echo "the site of $tag cannot be built with today's tools; it is left out" >&2
  fi
  rm -rf "$copy"
done
(IFS=,; echo "[${names[*]:-}]" > "$site/versions.json")
