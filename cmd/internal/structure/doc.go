// Package structure holds no code, only the test that guards the shape of the
// repository: who may import whom, what pure packages may not touch, and the
// rules for files. The tables in the test are the rules; a change of the shape
// is a change of a table.
package structure
