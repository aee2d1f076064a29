// Package trace reads and writes what gateways admitted: Stipend's own records
// of admissions, and the access logs that gateways keep anyway.
//
// # Records of admissions, version 1
//
// Text in UTF-8, one line per admission, ended by a newline. The first line is
// the header:
//
//	#stipend-admissions 1 recorder="gw-1" clock="monotonic:3f2a" unit=ns
//
// recorder is who wrote the file. clock names the clock that all times are
// readings of: files are merged only if it is the same, so that a monotonic
// clock carries the id of the machine's boot. unit is always ns. Then
//
//	1712 "acme" "read" 3 "gw-1" local decision
//
// time in ns, tenant, route class, cost in units, owner (gateway), path and
// stage, with one space between. The three names are Go string literals in
// double quotes, which makes the encoding injective; an owner may be "". path
// is local, central, emergency or off (mode off or shadow let it pass), or
// unstated. stage says when the time was read: decision, or forwarded, right
// before the first byte went out. Two more lines are possible:
//
//	#lost 17
//	#end lines=120000 lost=17
//
// lost says that so many admissions were not written at this place, because
// the writer's queue was full. end closes a file that was finished; without it
// the writer died and what it had buffered is missing. Another header begins
// another part. A last line without its newline was cut by the writer's death; it
// is not counted but reported. Anything else is an error.
//
// # Access logs
//
// Combined is the format of Apache and nginx (the common format too); JSONLines
// has one object a line; CSV names its columns in the first line. Columns says
// which field is what.
//
// A log with a resolution of one second says only in which second a request
// came: Reader.Resolution is to be added to bounds.Config.Skew. Apache logs the
// start of a request, nginx its end: with a duration in the log, Columns.Duration
// takes it off; otherwise the longest duration is skew as well.
//
// # Order and memory
//
// Every Reader yields records in order of time. It holds back what is younger
// than the newest time read less Window, at most MaxHeld records, and refuses a
// record that comes later than that. Lines are at most MaxLine bytes. So memory
// is bounded whatever the input.
package trace
