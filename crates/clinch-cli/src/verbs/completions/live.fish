# Asks clinch itself what may stand here, which knows the locks of the store.
function __clinch_live
    set -l words (commandline -opc)
    # What is set for the command is no word of it.
    while string match -q -- '*=*' $words[1]
        set -e words[1]
    end
    set -l current (commandline -ct)
    set -l begun (string unescape -- (string replace -r '^["\']' '' -- "$current"))
    set -l found (command clinch complete -- $words "$begun" 2>/dev/null)
    switch "$found[1]"
        case words
            printf '%s\n' $found[2..]
        case files
            __fish_complete_path "$current"
        case 'command *'
            set -l before (math (string replace 'command ' '' -- $found[1]) + 1)
            set -l command
            test $before -le (count $words); and set command (string escape -- $words[$before..])
            complete -C (string join ' ' -- $command "$current")
    end
end

