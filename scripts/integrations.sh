#!/bin/sh
# Makes the environments of tests/integrations in .venvs, where they are missing or of other versions:
#
#     scripts/integrations.sh [PYTHON [NAME]]
#
# verl (with Megatron-Core) is for tests/integrations, trl for `potstill bench trainer`.
#
# One for each framework, since what they require excludes one another. Python 3.10 to 3.12; some minutes, 2 GB each.
set -e
cd "$(dirname "$0")/.."
python=${1:-python3}
name=${2:-verl}

environment() { # NAME REQUIREMENT...
    folder=.venvs/$1
    shift
    if [ "$(cat "$folder/made" 2>/dev/null)" = "$*" ]; then
        return
    fi
    "$python" -m venv --clear "$folder"
    PIP_NO_COMPILE=1 "$folder/bin/pip" install -q "$@"
    "$folder/bin/pip" install -q --no-deps -e .
    echo "$*" >"$folder/made"
}

tools="torch==2.13.0 jaxtyping==0.3.11 beartype==0.23.1 pytest==9.2.0"
case $name in
verl) environment verl $tools verl==0.9.1 megatron-core==0.16.1 transformers==5.10.4 tensordict==0.10.0 ;;
trl) environment trl $tools trl==1.16.0 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0 ;;
*) echo "no environment is called $name; it is verl or trl" >&2 && exit 2 ;;
esac
