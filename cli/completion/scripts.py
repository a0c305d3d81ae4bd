"""The scripts of the shells. Each asks the agentctl that is typed what may come next, so that none is ever out of
date; `:files` for an answer means names of files."""

BASH = r"""
# bash completion of agentctl
_agentctl() {
    local found=()
    mapfile -t found < <("${COMP_WORDS[0]}" completion bash -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null)
    COMPREPLY=()
    if [[ ${found[0]} == :files ]]; then
        compopt -o default
    else
        COMPREPLY=("${found[@]}")
    fi
}
complete -F _agentctl agentctl
"""
ZSH = r"""
#compdef agentctl
_agentctl() {
    local -a found
    found=("${(@f)$("${words[1]}" completion zsh -- "${(@)words[2,CURRENT]}" 2> /dev/null)}")
    if [[ "${found[1]}" == :files ]]; then
        _files
    elif [[ -n "${found[1]}" ]]; then
        _describe agentctl found
    fi
}
if [[ "${funcstack[1]}" == _agentctl ]]; then
    _agentctl "$@"
else
    compdef _agentctl agentctl
fi
"""
FISH = r"""
# fish completion of agentctl
function __agentctl_next
    set -l typed (commandline -opc)
    set -l word (commandline -ct)
    set -l found ($typed[1] completion fish -- $typed[2..-1] "$word" 2> /dev/null)
    if test "$found[1]" = :files
        __fish_complete_path "$word"
    else if set -q found[1]
        printf '%s\n' $found
    end
end
complete -c agentctl -f -a '(__agentctl_next)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
"""Shell -> its script."""
