#!/usr/bin/env bash
# Apply the patch series to an SGLang 0.5.23 source tree: patches/apply.sh [--check | --reverse] TREE
#
# TREE holds python/sglang (a checkout) or sglang (an unpacked wheel, site-packages).
# --check says whether every patch would apply and changes nothing; --reverse takes them out again.
# All patches apply or none does.

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

mode=apply tree=''
for argument; do
    case $argument in
    --check) mode=check ;;
    --reverse) mode=reverse ;;
    --help | -h)
        sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
        exit
        ;;
    -*)
        echo "apply.sh: unknown option $argument" >&2
        exit 2
        ;;
    *) tree=$argument ;;
    esac
done

root=''
for candidate in "$tree/python" "$tree"; do
    if [[ $tree && -d $candidate/sglang/srt ]]; then
        root=$candidate
        break
    fi
done
if [[ ! $root ]]; then
    echo "apply.sh: '$tree' holds neither python/sglang nor sglang" >&2
    exit 2
fi

series=("$here"/[0-9]*.patch)
if [[ $mode == reverse ]]; then
    direction=(--reverse)
    for ((i = 0, j = ${#series[@]} - 1; i < j; i++, j--)); do
        held=${series[i]} series[i]=${series[j]} series[j]=$held
    done
else
    direction=(--forward)
fi

# Each patch touches a file of its own, so that all can be tried before one is applied.
for patch in "${series[@]}"; do
    if ! output=$(patch --strip=1 --directory="$root" "${direction[@]}" --dry-run --input="$patch"); then
        echo "apply.sh: $(basename "$patch") does not fit $root:" >&2
        echo "$output" >&2
        exit 1
    fi
done
if [[ $mode != check ]]; then
    for patch in "${series[@]}"; do
        patch --quiet --strip=1 --directory="$root" "${direction[@]}" --no-backup-if-mismatch --input="$patch"
    done
fi
echo "$mode: ${#series[@]} patches, $root"
