
# Asks clinch itself what may stand here, which knows the locks of the store. An older one does not: then the words above are offered.
_clinch_live() {
    local -a words=() starts=() found=()
    local rest=$COMP_LINE blank word i at
    # Bash splits words at : and = too; what no blank divides is one word.
    for ((i = 0; i <= COMP_CWORD; i++)); do
        blank=${rest%%[^[:space:]]*}
        rest=${rest#"$blank"}
        word=${COMP_WORDS[i]}
        rest=${rest#"$word"}
        if ((i == COMP_CWORD)); then
            # Up to the cursor.
            at=$((COMP_POINT - (${#COMP_LINE} - ${#rest} - ${#word})))
            word=${word:0:at > 0 ? at : 0}
        fi
        if [[ $i == 0 || -n $blank ]]; then
            words+=("$word")
            starts+=("$i")
        else
            words[${#words[@]} - 1]+=$word
        fi
    done
    while IFS= read -r word; do
        found+=("$word")
    done < <(clinch complete --bash="${COMP_WORDBREAKS//[^:=@]/}" -- "${words[@]}" 2> /dev/null)
    COMPREPLY=()
    case ${found[0]-} in
        words)
            # Quoted as the word under the cursor is, without what bash keeps of it. Then a tab, and what it means.
            COMPREPLY=("${found[@]:1}")
            COMPREPLY=("${COMPREPLY[@]%%$'\t'*}")
            case ${#COMPREPLY[@]}${COMPREPLY[0]-} in
                1*[=/]) compopt -o nospace ;;
            esac
            ;;
        files) compopt -o default ;;
        command\ *) _clinch_command "${starts[${found[0]#command }]}" "$2" ;;
        *)
            compopt -o bashdefault -o default
            _clinch "$@"
            ;;
    esac
}

# Completes the command that begins at a word of bash's, as it is completed by itself.
_clinch_command() {
    if declare -F _comp_command_offset > /dev/null; then
        _comp_command_offset "$1"
    elif declare -F _command_offset > /dev/null; then
        _command_offset "$1"
    elif (($1 == COMP_CWORD)); then
        compopt -o filenames
        while IFS= read -r word; do
            COMPREPLY+=("$word")
        done < <(compgen -A command -A directory -- "$2")
    else
        compopt -o bashdefault -o default
    fi
}

complete -F _clinch_live clinch
